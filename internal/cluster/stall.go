package cluster

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
)

// Raft's main goroutine stores entries, and passes them to the state machine. While the disk hangs
// it does nothing else. A leader would then keep the lead as long as that lasts: its heartbeats
// come from other goroutines. So a node watches its disk, and a stalled leader forfeits its term if
// others are better off. Its owner ends. For the rest of the term the node withholds all messages
// that would keep the others from electing another leader. When the disk answers again, Raft finds
// that it had no contact with a majority for too long, and steps down.
//
// The answers to heartbeats report the disks of the others. Nothing is withheld while no majority
// of the voters is better off: no other node could lead.

// The parts of Config.Disk, which WatchDisk makes: those of the shards follow by their numbers.
const (
	LogPart    = 0 // the log of Raft, the votes and the manifest
	copyPart   = 1 // checkpoints being made; no term is forfeited for it
	FirstShard = 2
)

// partNames are the names of the parts, for so many shards.
func partNames(shards int) []string {
	names := []string{"log", "checkpoint"}
	for i := range shards {
		names = append(names, fmt.Sprintf("shard %d", i))
	}
	return names
}

// WatchDisk puts a watch around the file system of a directory.
func WatchDisk(d *manifest.Directory, after time.Duration, log *slog.Logger) *failstop.Watch {
	w := failstop.NewWatch(after, log, partNames(d.Shards)...)
	dirs := map[string]*failstop.Part{d.FS.PathDir(d.FS.PathJoin(d.Path, manifest.Name)): w.Part(LogPart)}
	for i := range d.Shards {
		p := w.Part(FirstShard + i)
		dirs[manifest.ShardDir(d.FS, d.Path, i)], dirs[manifest.MetaDir(d.FS, d.Path, i)] = p, p
	}
	d.FS = w.FS(d.FS, dirs, w.Part(copyPart))
	return w
}

func (n *Node) logDisk() *failstop.Part    { return n.c.Disk.Part(LogPart) }
func (g *Group) storeDisk() *failstop.Part { return g.node.c.Disk.Part(FirstShard + g.index) }

// stalledFor is how long the log of the node, or its store of the shard, has been stalled; 0:
// neither is.
func (g *Group) stalledFor() time.Duration {
	return max(g.node.logDisk().Stalled(), g.storeDisk().Stalled())
}

// isUnsteady reports whether either is stalled, or was a moment ago, or this node has forfeited
// terms so often that it is too early for it to lead again. Another node counts a failure only if
// it has taken over itself.
func (g *Group) isUnsteady() bool {
	n := g.node
	return n.logDisk().IsUnsteady() || g.storeDisk().IsUnsteady() || n.crashes.distrusts(n.self.ServerID())
}

// diskAge is how long the oldest operation on either has been under way.
func (g *Group) diskAge() time.Duration { return max(g.node.logDisk().Age(), g.storeDisk().Age()) }

// stallError says that the disk does not answer, or has not for so long that a term was forfeited.
func (g *Group) stallError() error {
	if age := g.stalledFor(); age > 0 {
		return fmt.Errorf("node %q: %w, for %v", g.node.self.Node, base.ErrStalled, age.Round(time.Millisecond))
	}
	return fmt.Errorf("node %q: %w in time", g.node.self.Node, base.ErrStalled)
}

// withholds returns an error if this node sends no messages as the leader of a term. It forfeits
// the term if that is due.
func (g *Group) withholds(term uint64) error {
	if g.node.silent.Load() {
		return base.ErrClosed
	}
	if !g.hasForfeited(term) {
		if g.stalledFor() == 0 || !g.othersAreBetter(term) {
			return nil
		}
		g.forfeit(term)
	}
	return fmt.Errorf("shard %d, term %d: %w", g.index, term, g.stallError())
}

// othersAreBetter reports whether a majority of the voters, without this node, has answered the
// last heartbeats of a term, and has no long disk operation. Half of Watch.After is long: nodes
// with a common cause stall one after the other.
func (g *Group) othersAreBetter(term uint64) bool {
	members, err := g.members()
	if err != nil {
		return false
	}
	voters, better := votersOf(members), 0
	for _, m := range voters {
		if m.ID != g.node.self.ServerID() && g.health.outage(m.ID, term) == nil &&
			g.health.diskAge(m.ID, term, 2*g.node.c.HeartbeatTimeout) < g.node.c.Disk.After()/2 {
			better++
		}
	}
	return better > len(voters)/2
}

// forfeit ends the term of this node as the leader, and all before.
func (g *Group) forfeit(term uint64) {
	if g.hasForfeited(term) {
		return
	}
	raise(&g.forfeited, term)
	if g.leads() {
		g.node.crashes.note(g.node.self.ServerID())
		g.node.log.Error("leadership forfeited", "shard", g.index, "term", term, "err", g.stallError())
	}
	g.forfeits.notify()
	g.changed()
}

func (g *Group) hasForfeited(term uint64) bool {
	last := g.forfeited.Load()
	return last > 0 && term <= last
}

// heard is the leader of a term that Raft has not stored yet.
type heard struct {
	term uint64
	id   raft.ServerID
	addr raft.ServerAddress
}

// hear records the leader of a later term than Raft's, with its first message: calls go to it from
// then on. Raft names it when the term is stored. On a disk that hangs, Raft blocks in that
// message, and the leader sends no other within raftTimeout; but the disk counts as stalled only
// after Watch.After.
func (g *Group) hear(h heard) {
	for last := g.heard.Load(); last == nil || last.term < h.term; last = g.heard.Load() {
		if g.heard.CompareAndSwap(last, &h) {
			g.termOwner.begin(h.id, g.node.c.ElectionTimeout)
			g.changed()
		}
	}
}

// isStuck reports whether Raft cannot take a message of a leader's term, since it would have to
// store the term on a stalled disk. Each such message would block a goroutine. A leader on this
// node ends.
func (g *Group) isStuck(req *raft.AppendEntriesRequest, from raft.ServerID, addr raft.ServerAddress) bool {
	r := g.log.raft.Load()
	if r == nil || req.Term <= r.CurrentTerm() {
		return false
	}
	g.hear(heard{req.Term, from, addr})
	if g.node.logDisk().Stalled() == 0 {
		return false
	}
	g.forfeit(req.Term - 1)
	return true
}

// leaderNow is the leader of the shard, as far as this node knows. The Raft of a replica that has
// failed stores no term any more.
func (g *Group) leaderNow() (raft.ServerAddress, raft.ServerID) {
	if h := g.heard.Load(); h != nil && h.term > g.raft.CurrentTerm() && g.Failure() == nil {
		return h.addr, h.id
	}
	return g.raft.LeaderWithID()
}
