"""Build-time twins of the plugins: names, fields and shape rules, for builds without the library.

They have no kernels; an engine built with them is never run.
"""

from __future__ import annotations

from granikv.engines.io import (
    ALL_REDUCE_ATTRIBUTES,
    ALL_REDUCE_OP,
    ATTENTION_ATTRIBUTES,
    ATTENTION_OP,
    PLUGIN_INPUTS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)

_CREATORS = []  # the registry does not keep them alive


def register(trt) -> None:
    int32, float32 = trt.DataType.INT32, trt.DataType.FLOAT

    class Plugin(
        trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime
    ):
        def __init__(self, op, fields):
            for base in Plugin.__bases__:
                base.__init__(self)
            self.op, self.fields, self.num_outputs = op, fields, 1
            self.plugin_name, self.plugin_version = op, PLUGIN_VERSION
            self.plugin_namespace = PLUGIN_NAMESPACE

        def get_capability_interface(self, kind):
            return self

        def clone(self):
            return Plugin(self.op, self.fields)

        def get_aliased_input(self, index):
            return -1

        def get_output_data_types(self, types):
            return [types[0]]

        def get_output_shapes(self, inputs, shape_inputs, builder):
            out = trt.DimsExprs(inputs[0])
            if self.op == ATTENTION_OP:
                out[1] = builder.constant(self.fields["num_qo_heads"] * self.fields["head_dim"])
            return [out]

        def supports_format_combination(self, pos, in_out, num_inputs):
            desc = in_out[pos].desc
            if desc.format != trt.TensorFormat.LINEAR:
                return False
            if self.op == ATTENTION_OP and pos < num_inputs:
                kind = PLUGIN_INPUTS[pos].dtype
                if kind != "network":
                    return desc.type == (int32 if kind == "int32" else float32)
            return desc.type == in_out[0].desc.type

        def configure_plugin(self, inputs, outputs):
            if self.op == ATTENTION_OP:
                assert len(inputs) == len(PLUGIN_INPUTS), len(inputs)
                assert inputs[-1].desc.dims[0] == 0 and len(inputs[-1].desc.dims) == 6

        def get_workspace_size(self, inputs, outputs):
            return 0

        def on_shape_change(self, inputs, outputs):
            pass

        def get_valid_tactics(self):
            return []

        def set_tactic(self, tactic):
            pass

        def enqueue(self, *_):
            raise NotImplementedError

        def attach_to_context(self, context):
            return self.clone()

        def get_fields_to_serialize(self):
            import numpy as np

            return trt.PluginFieldCollection(
                [
                    trt.PluginField(n, np.array([v], np.int32), trt.PluginFieldType.INT32)
                    for n, v in self.fields.items()
                ]
            )

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self, op, names):
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version = op, PLUGIN_VERSION
            self.plugin_namespace = PLUGIN_NAMESPACE
            self.names = names
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(n, b"", trt.PluginFieldType.INT32) for n in names]
            )

        def create_plugin(self, name, fields, phase):
            found = {f.name: int(f.data[0]) for f in fields if f.name in self.names}
            assert sorted(found) == sorted(self.names), (self.name, sorted(found))
            return Plugin(self.name, found)

    for op, names in ((ATTENTION_OP, ATTENTION_ATTRIBUTES), (ALL_REDUCE_OP, ALL_REDUCE_ATTRIBUTES)):
        _CREATORS.append(Creator(op, names))
        trt.get_plugin_registry().register_creator(_CREATORS[-1], PLUGIN_NAMESPACE)
