"""What the command line does with layouts, compiled kernels and this machine; none of it needs a GPU.

`catalogue` names kernels and their plans, `stack` is a plan over its steps, `draw` makes pictures,
`prebuilt` compiles ahead of time, `doctor` says what runs here.
"""
