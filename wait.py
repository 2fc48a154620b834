import time, os
T = "/work/wt/tmp-ranks/"; t = time.time()
while any(not os.path.exists(T + n + "out.txt") or "READY" not in open(T + n + "out.txt").read() for n in ("main", "ranks")): time.sleep(0.2)
print("ready", time.time() - t)
