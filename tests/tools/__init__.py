"""What tests and benchmarks need beside the product."""
