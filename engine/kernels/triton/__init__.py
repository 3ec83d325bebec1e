"""The hot operations as Triton kernels, for CUDA devices (Triton 3.6 to 3.9).

Only `engine.kernels` chooses them. Every function here must agree with `engine.kernels.reference`
or `engine.kernels.reference_verify`; the tests hold them to that under Triton's interpreter
(`TRITON_INTERPRET=1`, on CPU tensors) and on a GPU where there is one. Importing this package
does not import Triton; importing its modules does.
"""
