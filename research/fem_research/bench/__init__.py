"""What FEM costs: time, memory and operations beside attention of equal weights, and beside Tables 5 and 7.

cases.py says what a profile measures, mixers.py builds the mixers, workloads.py makes train steps of them, decode.py
generates tokens with them, tables.py shows the results, paper.py holds the paper's figures, experiment.py is
`fem bench`. The clock is `common.measure`.
"""
