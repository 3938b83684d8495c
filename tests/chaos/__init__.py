"""Faults by the thousand: what may break, whom it may befall, and what must be true afterwards."""
