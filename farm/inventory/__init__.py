"""Read and check board types, core types and fleet files. The data itself lies in the top-level `inventory/` folder."""
