"""Reads for a GPU: the request queue, and long runs of pages by GPUDirect Storage."""
