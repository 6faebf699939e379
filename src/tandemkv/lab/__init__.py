"""The acceptance lab: does a drafter draft as well on every path as it does cold?"""
