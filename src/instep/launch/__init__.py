"""Start it everywhere: a request becomes a plan, and the plan is carried out. Needs no torch."""
