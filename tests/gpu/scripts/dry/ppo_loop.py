"""PPO in a loop of one's own: a made environment on the host, policy and value networks."""

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Env:
    def reset(s):
        s.t = 0
        return np.random.randn(8).astype("float32")

    def step(s, a):
        s.t += 1
        return (np.random.randn(8).astype("float32"), float(a == 1), s.t >= 50)


dev = "cuda"
pi = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(dev)
v = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(dev)
opt = torch.optim.Adam([*pi.parameters(), *v.parameters()], 0.0003)
env = Env()
for it in range(3):
    obs, acts, lps, rews, dones = ([], [], [], [], [])
    o = env.reset()
    for _ in range(256):
        with torch.no_grad():
            d = Categorical(logits=pi(torch.from_numpy(o).to(dev)))
            a = d.sample()
        n, r, done = env.step(a.item())
        obs.append(o)
        acts.append(a)
        lps.append(d.log_prob(a))
        rews.append(r)
        dones.append(done)
        o = env.reset() if done else n
    seen = torch.tensor(np.array(obs), device=dev)
    A = torch.stack(acts)
    L = torch.stack(lps)
    ret, R = ([], 0.0)
    for r, dn in zip(reversed(rews), reversed(dones)):
        R = r + 0.99 * R * (1 - dn)
        ret.insert(0, R)
    ret = torch.tensor(ret, device=dev)
    for _ep in range(4):
        for idx in torch.randperm(256).split(64):
            d = Categorical(logits=pi(seen[idx]))
            lp = d.log_prob(A[idx])
            val = v(seen[idx]).squeeze(-1)
            adv = ret[idx] - val.detach()
            adv = (adv - adv.mean()) / (adv.std() + 1e-08)
            ratio = (lp - L[idx]).exp()
            pl = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss = pl + 0.5 * (ret[idx] - val).pow(2).mean() - 0.01 * d.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(pi.parameters(), 0.5)
            opt.step()
            kl = (L[idx] - lp).mean().item()
            if kl > 0.5:
                break
    print(it, sum(rews), loss.item())
