"""What shall be done: a request and the facts of machines become a plan, which can be read before it is carried out."""
