"""FP8 and MXFP8: quantisation and the products that read it."""
