from tensorrt_llm.parameter import Parameter


class Module:
    def __init__(self):
        self._modules, self._parameters = {}, {}

    def forward(self, *args, **kwargs):
        raise NotImplementedError

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name):
        for kind in ("_parameters", "_modules"):
            if name in self.__dict__.get(kind, {}):
                return self.__dict__[kind][name]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __setattr__(self, name, value):
        if isinstance(value, Parameter):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name, param):
        self._parameters[name] = param

    def named_parameters(self, prefix="", recurse=True):
        """Each parameter once, under its first name."""
        seen = set()
        for name, parameter in self._walk(prefix):
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def _walk(self, prefix):
        dot = prefix and prefix + "."
        for name, parameter in self._parameters.items():
            yield dot + name, parameter
        for name, module in self._modules.items():
            yield from module._walk(dot + name)


class ModuleList(Module):
    def __init__(self, modules):
        super().__init__()
        for index, module in enumerate(modules):
            self._modules[str(index)] = module

    def __getitem__(self, idx):
        if not -len(self) <= idx < len(self):
            raise IndexError(idx)
        return self._modules[str(idx % len(self))]

    def __len__(self):
        return len(self._modules)
