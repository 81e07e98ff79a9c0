package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
)

// simLinks are slow links and links with a high latency, and the loads that show their effect.
var simLinks = []simFault{
	{"slow link", 3, func(s *schedule) bool {
		a, b := s.someLink()
		rate := int64(64<<10) << s.rng.IntN(8)
		s.note("%s -> %s passes %d bytes/s", a, b, rate)
		there, back := s.net.SetBandwidth(a, b, rate), false
		if s.rng.IntN(2) == 0 {
			back = s.net.SetBandwidth(b, a, rate)
		}
		return there || back
	}},
	{"long link", 3, func(s *schedule) bool {
		a, b := s.someLink()
		d := s.upTo(2 * time.Second)
		s.note("%s -> %s is %v late", a, b, d)
		return s.net.SetDelay(a, b, d)
	}},
	{"backlog", 2, func(s *schedule) bool {
		n, size, perBatch, bytes := s.anyNode(), 1+s.rng.IntN(128<<10), 1, 2<<20
		if s.large {
			size, bytes = 1+s.rng.IntN(1<<20), simBacklog
			perBatch = 1 + s.rng.IntN(min(simLargeEntry/size, 256))
		}
		bytes = min(bytes, 200*size*perBatch)
		s.note("backlog of batches of %d tasks of %d bytes by %s", perBatch, size, n.name)
		s.done.Go(func() { s.backlog(n, size, perBatch, bytes) })
		return simQueue(n) != nil
	}},
	{"drift", 4, func(s *schedule) bool {
		if n := s.anyNode(); s.h.Drifting {
			ppm := s.rng.Int64N(1_000_000) - 500_000
			n.machine.Wall.Drift(ppm)
			s.note("the clock of %s gains %d ms a second", n.name, ppm/1000)
		}
		return s.h.Drifting
	}},
	{"rate", 2, func(s *schedule) bool {
		if n := s.anyNode(); s.h.Rates {
			ppm := simtest.DrawRate(s.rng)
			n.machine.Mono.Run(ppm)
			s.note("the monotonic clock of %s gains %d ms a second", n.name, ppm/1000)
		}
		return s.h.Rates
	}},
}

// checkBacklogs checks that every acknowledged task of a backlog is stored.
func (s *schedule) checkBacklogs(tasks map[codeq.ID]*codeq.TaskInfo) {
	s.copying.Lock()
	defer s.copying.Unlock()
	for id := range s.backlogs {
		if tasks[id] == nil {
			s.t.Errorf("task %s of a backlog was acknowledged and is not stored", id)
		}
	}
}

// simDisks are disks that fail or are full, and nodes that end for ever.
var simDisks = []simFault{
	{"broken disk", 2, func(s *schedule) bool {
		n, fault, d := s.someNode(), simDiskFaults[s.rng.IntN(len(simDiskFaults))], s.upTo(10*time.Second)
		if q, _ := n.queue(); q == nil || n.broken.Swap(true) {
			return false
		}
		s.h.Breaks()
		s.note("on %s fail %s, until its process is started again in %v", n.name, fault.what, d)
		n.breakDisk(fault.fails)
		s.done.Go(func() {
			time.Sleep(d)
			n.crash(100)
			n.raise()
		})
		return true
	}},
	{"hung disk", 2, func(s *schedule) bool {
		n, d := s.someNode(), s.upTo(20*time.Second)
		// Only the stores hang, or the log too. A log that several groups share must not hang:
		// while Pebble begins a new log for one group, the others wait for a mutex, and the fake
		// clock waits for them. Received files must not hang either: connections wait for each
		// other in the same way.
		store := s.rng.IntN(4) == 0 || s.opts.Shards > 1
		n.mu.Lock()
		life := n.life
		n.mu.Unlock()
		if life == nil || !life.Hang(func(_, name string) bool {
			return !strings.Contains(name, "receiving-") && (!store || strings.Contains(name, "shard-"))
		}) {
			return false
		}
		s.note("the disk of %s hangs for %v (its stores only: %t)", n.name, d, store)
		s.done.Go(func() {
			time.Sleep(d)
			life.Answer()
		})
		return true
	}},
	{"full disk", 2, func(s *schedule) bool {
		n, d := s.someNode(), s.upTo(10*time.Second)
		n.mu.Lock()
		life, lives := n.life, n.lives
		n.mu.Unlock()
		if life == nil || !life.Fill() {
			return false
		}
		s.h.Breaks()
		really, left, said := s.rng.IntN(2) == 0, int64(256)<<s.rng.IntN(13), s.rng.IntN(2) == 0
		if really {
			s.note("the disk of %s has %d bytes for %v (it says so: %t)", n.name, left, d, said)
			n.broken.Store(true)
			life.Limit(left, said)
		} else {
			s.note("the disk of %s is full for %v", n.name, d)
			life.SetFree(0)
		}
		s.done.Go(func() {
			time.Sleep(d)
			life.MakeRoom()
			if really {
				s.reviveFailed(n, lives)
			}
		})
		return true
	}},
	{"full disks", 1, func(s *schedule) bool {
		nodes, d := s.members(), s.upTo(10*time.Second)
		free := int64(s.rng.IntN(5)) * (64 << 20) // of the 256 MiB that a queue wants
		var full []*simtest.Life
		for _, i := range s.rng.Perm(len(nodes))[:len(nodes)/2+1] {
			n := nodes[i]
			n.mu.Lock()
			life := n.life
			n.mu.Unlock()
			if life != nil && life.Fill() {
				life.SetFree(free)
				full = append(full, life)
			}
		}
		if len(full) == 0 {
			return false
		}
		s.h.Breaks()
		s.note("%d disks have %d bytes for %v", len(full), free, d)
		s.done.Go(func() {
			time.Sleep(d)
			for _, life := range full {
				life.MakeRoom()
			}
		})
		return true
	}},
	{"flip", 2, func(s *schedule) bool {
		n := s.someNode()
		if q, _ := n.queue(); q == nil || n.broken.Load() || !s.canLose(n) || !s.moving.CompareAndSwap(false, true) {
			return false
		}
		s.flip(n)
		return true
	}},
	{"remove beside a dead node", 2, func(s *schedule) bool {
		nodes := s.members()
		i := s.rng.Perm(len(nodes))
		dead, live, by := nodes[i[0]], nodes[i[1]], nodes[i[2]]
		if q, _ := by.queue(); q == nil || !s.moving.CompareAndSwap(false, true) {
			return false
		}
		s.note("crash %s; %s removes %s", dead.name, by.name, live.name)
		needed := len(nodes) == 3 && by.knowsAll(nodes)
		dead.crash(100)
		_, life := dead.queue()
		s.done.Go(func() {
			defer s.moving.Store(false)
			s.h.Leaves(live.name)
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			q, _ := by.queue()
			if q == nil {
				return
			}
			if needed {
				s.done.Go(func() { s.requireMember(ctx, live, by, dead, life) })
			}
			live.joinsNoMore()
			err := q.RemoveNode(ctx, live.name)
			cancel()
			s.note("%s removes %s: %v", by.name, live.name, err)
			if errors.Is(err, codeq.ErrNoMajority) {
				return // no member has changed
			}
			s.grow(s.note) // some shards may have removed the node
			s.remove(live, s.note, nil)
		})
		return true
	}},
}

// requireMember checks, until ctx ends, that the node by still knows the node live as a member
// while dead is down since the end of a life.
func (s *schedule) requireMember(ctx context.Context, live, by, dead *simNode, life int) {
	for {
		stays := by.knowsAll([]*simNode{live})
		if q, now := dead.queue(); q != nil || now != life {
			return
		}
		if !stays {
			s.t.Errorf("%s is removed beside %s, which is dead: %s has no majority", live.name, dead.name, by.name)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// knowsAll reports whether this node knows all nodes as voters in every shard, or is down.
func (n *simNode) knowsAll(nodes []*simNode) bool {
	q, _ := n.queue()
	for shard := 0; q != nil && shard < n.cluster.opts.Shards; shard++ {
		members := inspect.Of(q).Group(shard).Raft().GetConfiguration().Configuration().Servers
		for _, o := range nodes {
			if !slices.ContainsFunc(members, func(m raft.Server) bool {
				return m.Suffrage == raft.Voter && strings.HasPrefix(string(m.ID), o.name+"/")
			}) {
				return false
			}
		}
	}
	return true
}

// reviveFailed opens a node again if its life has failed because of missing space: that happens if
// the reserve of a store is too small.
func (s *schedule) reviveFailed(n *simNode, life int) {
	for range 20 {
		q, now := n.queue()
		if q == nil || now != life {
			return
		}
		for shard := range inspect.Of(q).Shards() {
			if err := inspect.Of(q).Group(shard).Failure(); err != nil {
				s.note("%s is started again: %v", n.name, err)
				n.crash(100)
				n.raise()
				return
			}
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// flip closes or kills a node, and changes a bit in one of its files. The node is replaced. An
// opened node detects the bit, but not a loss at the end of its logs after a kill. Pebble checks
// blocks of tables only when it reads them, and a goroutine of Pebble that finds such damage may
// never end; a bubble does not allow that. So Verify checks the node first, and the node is not
// opened if Verify finds damage.
func (s *schedule) flip(n *simNode) {
	killed, tables := s.rng.IntN(2) == 0, s.rng.IntN(2) == 0
	if killed {
		n.crash(100)
	} else {
		n.stop()
	}
	s.h.Breaks()
	c := testkit.ImageOf(s.t, n.machine.Disk(), "queue")
	isTable := func(name string) bool { return strings.HasSuffix(name, ".sst") }
	tables = tables && slices.ContainsFunc(c.Files, isTable)
	c.Files = slices.DeleteFunc(c.Files, func(name string) bool {
		return isTable(name) != tables || killed && strings.HasSuffix(name, ".log")
	})
	name := c.Files[s.rng.IntN(len(c.Files))]
	bit := s.rng.IntN(8 * len(c.Content[name]))
	n.machine.Put(c.Flip(s.t, name, bit), n.machine.Votes())
	n.broken.Store(true)
	what := fmt.Sprintf("bit %d of %s of %s is flipped (killed %t)", bit, name, n.name, killed)
	sound := true
	if tables {
		found, err := codeq.Verify("queue", inspect.With(&codeq.VerifyOptions{}, inspect.Private{FS: n.machine.Disk()}))
		if err != nil {
			s.t.Errorf("%s: Verify: %v", what, err)
		}
		if sound = err == nil && found.OK(); !sound {
			s.note("%s, and found by Verify", what)
		}
	}
	if sound {
		err := s.open(n)
		s.note("%s: %v", what, err)
		if err != nil && (tables || !errors.Is(err, codeq.ErrCorrupt)) {
			s.t.Errorf("%s: %v", what, err)
		}
	}
	n.mu.Lock()
	n.removed = true
	n.mu.Unlock()
	s.done.Go(func() {
		defer s.moving.Store(false)
		s.h.Leaves(n.name) // in case it was opened
		s.replace(n, s.note, nil)
	})
}

// recoverAlone makes one node go on alone with all stored tasks, and others join it. If a majority
// has lost power before, the node goes on with its own tasks. REQUIRES: the cluster is at rest.
func (s *schedule) recoverAlone(tasks map[codeq.ID]*codeq.TaskInfo) {
	n, nodes := s.anyNode(), len(s.members())
	beside := (nodes - 1) / 2
	if s.kill && s.rng.IntN(2) == 0 {
		n, beside, tasks = s.loseMajority(), nodes-1, nil
	}
	each(s.members(), func(n *simNode) { n.crash(100) })
	if !s.goOn(n, beside) {
		return
	}
	s.grow(s.note)
	s.rest()
	now, err := s.tasks()
	if err = errors.Join(err, s.check()); err != nil {
		s.t.Error(err)
	}
	for id, info := range tasks {
		if now[id] == nil && info.State == codeq.Ready {
			s.t.Errorf("task %s (%s) is gone after RecoverCluster", id, info.Payload)
		}
	}
}

// newFormat is the format of this build, and oldFormat is that of older builds. They differ only
// with the tag nextformat.
const newFormat, oldFormat = manifest.Format, manifest.OldestOfNodes

// simUpgrade kills a node, which then comes back with this build.
var simUpgrade = simFault{"upgrade", 8, func(s *schedule) bool {
	n := s.anyNode()
	if !n.turn.TryLock() {
		return false
	}
	defer n.turn.Unlock()
	if !n.upgrade() {
		return false
	}
	s.note("upgrade %s", n.name)
	return true
}}

// upgrade kills the node if its build is older than this one. The next life has this build.
// REQUIRES: turn: a life that has begun to open would not be killed.
func (n *simNode) upgrade() bool {
	n.mu.Lock()
	old := n.newest != 0
	n.newest = 0
	n.mu.Unlock()
	if old {
		n.crash(100)
	}
	return old
}

// awaitFormat waits until all shards have the format of this build. All nodes must have this build.
func (c *simCluster) awaitFormat() {
	c.until("the rise of the format", func() bool {
		st, err := simQueue(c.members()[0]).ClusterStatus(context.Background())
		return err == nil && !slices.ContainsFunc(st.Shards, func(sh codeq.ShardStatus) bool { return sh.Format != newFormat })
	})
}
