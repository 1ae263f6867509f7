"""The TensorRT plugin: granikv's attention kernels, compiled ahead of time, behind IPluginV3."""
