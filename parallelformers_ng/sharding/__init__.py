"""What every model passes through: policies, the plan made of them, and the parallel layers that carry it out."""
