from pathlib import Path
def edit(file, *pairs):
    p=Path(file); t=p.read_text()
    for a,b in pairs:
        if a not in t: print("MISSING", file, repr(a[:100]))
        t=t.replace(a,b)
    p.write_text(t)
