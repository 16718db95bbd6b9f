"""The loop: a trainer that gives the same numbers on one rank and on many, thin over pieces that work alone."""
