"""In-kernel helpers, traced into the kernels that call them."""
