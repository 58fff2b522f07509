"""Models written in other frameworks, as logical graphs: `sbp.frontend.torch`, `sbp.frontend.onnx`."""
