"""Policies, the plan made of them, and the parallel layers that carry it out: every model passes through here."""
