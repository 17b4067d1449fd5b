"""What some models have that most have not: one file each, which says all of it."""
