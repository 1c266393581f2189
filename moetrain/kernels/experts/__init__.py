"""The routed experts: routing, permutation, grouped products and the MLP made of them."""
