"""A dry run: an unchanged program on a card that is not there, tensors with shapes and storages but without data.

``device.cpp`` owns PyTorch's dispatch key for CUDA, ``machine`` is the card's memory, ``cuda`` answers for
``torch.cuda``, ``kernels`` and ``assumed`` know what only a device would. ``script`` runs a user's program in this
process; ``worker`` runs ``step``, memtrace's own QLoRA program, in another one, as a source of streams.
"""
