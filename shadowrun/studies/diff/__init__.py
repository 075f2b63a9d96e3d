"""Two recordings held against each other: which calls correspond, where results part first, and why. Needs no torch."""
