"""A dry run: the real Transformers, PEFT and bitsandbytes code on tensors without data, without a GPU.

Tensors live on PyTorch's ``meta`` device: shapes, types and storages, no memory. A dispatch mode notes every storage
at its birth and its death; what CUDA does differently is imitated (``cuda_ops``, ``overrides``, ``patches``). The
result is the same stream of allocations and frees that the shape engine of ``memtrace.estimate`` predicts, with real
stacks, for any architecture that Transformers knows.

``script`` runs an unchanged program instead: ``device.cpp`` owns PyTorch's dispatch key for CUDA, ``machine`` is the
card's memory, ``cuda`` answers for ``torch.cuda``, ``kernels`` and ``assumed`` know what only a device would.
"""
