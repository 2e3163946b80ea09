"""What compiled code may do with sums and products of floats: it knows no operation."""

# Infinities and NaN keep their meaning.
FAST = {"contract", "reassoc", "nsz", "arcp"}
