"""DIGITS where only the first users have any examples."""

from fedpriv.data.population import Population, UserStore, load_population


def population(users: int, speaking: int) -> Population:
    known = load_population("digits", {"users": users})
    offsets = known.users.offsets.clip(max=known.users.offsets[speaking])
    fields = {name: field[: offsets[-1]] for name, field in known.users.fields.items()}
    return Population(f"{known.name}, {speaking} speak", UserStore(fields, offsets), known.test)
