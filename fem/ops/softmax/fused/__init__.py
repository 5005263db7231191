"""The softmax read of a layer in few launches on a GPU: Triton kernels around torch's attention."""
