"""The hand-off between workers: offers, plans, sessions, wire and data planes. No torch."""
