"""Attention kernels in the Triton language; one file per operation, its twin in reference.py.

Compiled on a GPU, interpreted on a CPU (TRITON_INTERPRET=1). A kernel reads its work items and
their counts on the device, so a captured launch serves every plan that fits its grid.
"""
