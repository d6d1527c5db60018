"""The benchmark suite of the field: tasks, each with fedpriv and with pfl at equal settings.

    FEDPRIV_DATA=FOLDER .venv-rivals/bin/python -m simulations.suite [TASK …] [--out FOLDER]

trains every task without privacy, at ε = 2 and ε = 8 of those who are enrolled, and at ε = 2 as if
a million users were. An arm is a task, one of these settings, a tool and a seed. It runs in a
process of its own and leaves one file; later commands skip arms that left one with the same
settings. results.json has all arms, and accuracy.png shows them. pfl is in the environment of
`make suite`; elsewhere its arms are left out.

Read `tasks` first, then `arms`; `rival` is the side of pfl, `report` makes figure and page.

Both tools start from the same model, train the same users with the same local settings, clip to the
same norm and add noise with the same multiplier, which fedpriv calibrates. fedpriv draws each user
with a probability, divides by the expected number, and shuffles rows for each epoch. pfl is given
as many users, without replacement, and keeps the order of rows.
"""
