package cluster_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"codeq"
	"codeq/internal/inspect"
)

// These schedules have large loads: tasks come in large entries, or the log is short. At the end, a
// node that lacks much data catches up over a slow link, by the log or by the files of the store.

const (
	simBacklog    = 16 << 20 // bytes: limit of all backlogs; lag of a node in large entries
	simFiles      = 4 << 20  // bytes: lag of a node in small entries
	simLargeEntry = 8 << 20  // bytes: limit of the tasks
	simMessage    = 4 << 20  // bytes: limit of a Raft message with more than one entry
	simEntryRest  = 64 << 10 // bytes: limit of an entry without its tasks
)

// drawLoad gives one schedule in ten a large load.
func (s *schedule) drawLoad(opts *codeq.Options) {
	rng := rand.New(rand.NewPCG(s.seed, 5))
	if rng.IntN(10) != 0 {
		return
	}
	s.large = true
	opts.Shards = 1
	if rng.IntN(2) == 0 {
		inspect.Options(opts).SnapshotBytes = 128 << 10 << rng.IntN(4)
	}
	s.note("large loads, a snapshot each %d bytes (0: 64 MiB)", inspect.Options(opts).SnapshotBytes)
}

// chanceBatch returns that many tasks of a backlog. They do not compress.
func chanceBatch(rng *rand.Rand, tasks, size int) []codeq.Task {
	var key [32]byte
	for i := range key {
		key[i] = byte(rng.Uint32())
	}
	chance, batch := rand.NewChaCha8(key), make([]codeq.Task, tasks)
	for i := range batch {
		batch[i] = codeq.Task{Queue: "backlog", Payload: make([]byte, size)}
		_, _ = chance.Read(batch[i].Payload) // never fails
	}
	return batch
}

// backlog stores large tasks, one batch after the other. No client claims them.
func (s *schedule) backlog(n *simNode, size, perBatch, bytes int) {
	rng := rand.New(rand.NewPCG(s.seed, uint64(size)))
	for range max(bytes/(size*perBatch), 1) {
		q, life := n.queue()
		if q == nil || s.ending() {
			return
		}
		if s.large && s.backlogged.Add(int64(size*perBatch)) > simBacklog {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		ids, err := q.ProduceBatch(ctx, chanceBatch(rng, perBatch, size))
		cancel()
		if err == nil && n.alive(life) {
			s.keep(ids)
		}
	}
}

// keep records that tasks of a backlog are certainly stored.
func (s *schedule) keep(ids []codeq.ID) {
	s.copying.Lock()
	defer s.copying.Unlock()
	if s.backlogs == nil {
		s.backlogs = make(map[codeq.ID]bool)
	}
	for _, id := range ids {
		s.backlogs[id] = true
	}
}

// catchUp cuts a node off until it lacks much data, and gives it links with four times the rate of
// the produces during the transfer. The node catches up in the time that its links need, and
// receives little more than the stored bytes. The leader stays leader, and answers its callers.
// REQUIRES: all nodes are up, and connected.
func (s *schedule) catchUp() {
	s.rest()
	time.Sleep(2 * time.Minute) // until the leader is the home node
	leader, victim := s.lead()
	behind, ahead := inspect.Of(simQueue(victim)).Group(0), inspect.Of(simQueue(leader)).Group(0)
	term := ahead.Raft().CurrentTerm()
	size, perBatch, lacks := 1<<10+s.rng.IntN(6<<10), 1, simFiles // more entries than the log holds
	if inspect.Options(&s.opts).SnapshotBytes == 0 {
		size, perBatch, lacks = 256<<10, 1+s.rng.IntN(simLargeEntry/(256<<10)), simBacklog
		if s.rng.IntN(2) == 0 {
			perBatch = 14 + s.rng.IntN(3) // one such entry fits a message, and four do not
		}
	}
	stored, entry := int64(0), size*perBatch
	tasks, err := s.tasks()
	if err != nil {
		s.t.Error(err)
		return
	}
	for _, info := range tasks {
		stored += int64(len(info.Payload))
	}
	produce := func(size, tasks int) bool {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		ids, err := simQueue(leader).ProduceBatch(ctx, chanceBatch(s.rng, tasks, size))
		if err != nil {
			s.t.Errorf("produce while %s is behind: %v", victim.name, err)
			return false
		}
		s.keep(ids)
		stored += int64(size * tasks)
		return true
	}
	s.net.Isolate(victim.name, s.names())
	for got := 0; got < lacks; got += entry {
		if !produce(size, perBatch) {
			return
		}
	}
	s.net.Heal(true)
	rate := int64(lacks / (10 + s.rng.IntN(30)))
	s.note("%s lacks %d bytes, by %d in an entry, over links of %d bytes/s from leader %s", victim.name, lacks, entry, rate, leader.name)
	for _, n := range s.members() {
		s.net.SetBandwidth(n.name, victim.name, rate)
	}
	sent := func() (bytes int64) {
		for _, n := range s.members() {
			bytes += s.net.Sent(n.name, victim.name)
		}
		return bytes
	}
	before := sent()
	var watching sync.Mutex             // guards the fields below, all in bytes
	var read, most, message, last int64 // since the last send; maximum of read; largest message; sent
	leader.machine.WatchReads(func(bytes int) {
		watching.Lock()
		defer watching.Unlock()
		if now := sent(); now != last {
			read, last = 0, now
		}
		read += int64(bytes)
		most = max(most, read)
	})
	defer leader.machine.WatchReads(nil)
	victim.machine.WatchStores(func(bytes int) {
		watching.Lock()
		defer watching.Unlock()
		message = max(message, int64(bytes))
	})
	defer victim.machine.WatchStores(nil)
	const piece = 4 << 10
	pause := piece * 4 * time.Second / time.Duration(rate)
	for begun := time.Now(); behind.Applied()+8 < ahead.Applied(); time.Sleep(pause) {
		at := time.Now()
		if !produce(piece, 1) {
			return
		}
		if took := time.Since(at); took > 500*time.Millisecond {
			s.t.Errorf("produce took %v while %s catches up", took, victim.name)
		}
		if most := time.Duration(stored*3/2/rate)*time.Second + 30*time.Second; time.Since(begun) > most {
			s.t.Errorf("%s is behind after %v: it has applied %d of %d; %d bytes were sent, %d are stored",
				victim.name, most, behind.Applied(), ahead.Applied(), sent()-before, stored)
			return
		}
	}
	if got := sent() - before; got > stored*3/2+2<<20 {
		s.t.Errorf("%d bytes were sent to %s, of %d that are stored", got, victim.name, stored)
	}
	watching.Lock()
	defer watching.Unlock()
	if bound := int64(max(entry+simEntryRest, simMessage)); message > bound {
		s.t.Errorf("%s got %d bytes in a message", victim.name, message)
	} else if most > bound+simMessage {
		s.t.Errorf("%d bytes of entries were read before any were sent to %s", most, victim.name)
	}
	if now := ahead.Raft().CurrentTerm(); now != term {
		s.t.Errorf("term %d has become %d while %s caught up", term, now, victim.name)
	}
	s.note("%s has caught up", victim.name)
}
