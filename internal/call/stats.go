package call

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// StatsStep is how many queues a shard's owner copies in one group.
const StatsStep = 4096

// Stats copies the counts of a part of a shard's queues.
type Stats struct {
	engine.CountsCursor
	Counts []engine.QueueCounts
	More   bool                // there are queues after the place
	Queues int                 // about how many queues there are
	from   engine.CountsCursor // where this part begins
}

// next prepares to copy the next part.
func (b *Stats) next() { b.Counts, b.from = b.Counts[:0], b.CountsCursor }

// All copies the counts of all queues of a shard, part by part: ask carries out b there, add gets
// the counts of each part.
func (b *Stats) All(ask func() error, add func([]engine.QueueCounts)) error {
	return inParts(&b.More, b.next, ask, func() { add(b.Counts) })
}

// inParts asks for an answer part by part.
func inParts(more *bool, next func(), ask func() error, add func()) error {
	for *more = true; *more; {
		next()
		if err := ask(); err != nil {
			return err
		}
		add()
	}
	return nil
}

func (b *Stats) Decide(s *engine.State) (engine.Verdict, error) {
	b.Counts, b.More = s.Names.Counts(&b.CountsCursor, StatsStep, b.Counts)
	b.Queues = len(s.Names.Queues)
	return engine.Decided, nil
}

func (b *Stats) Append(dst []byte) []byte { return appendCursor(dst, b.CountsCursor) }
func (b *Stats) Read(r *wire.Reader)      { b.CountsCursor = readCursor(r) }

func appendCursor(dst []byte, p engine.CountsCursor) []byte {
	return wire.AppendUint(wire.AppendUint(wire.AppendBool(dst, p.Unnumbered), uint64(p.Next)), p.Begun)
}

func readCursor(r *wire.Reader) engine.CountsCursor {
	return engine.CountsCursor{Unnumbered: r.Bool(), Next: int(r.Uint32()), Begun: r.Uint()}
}

func (b *Stats) AppendReply(dst []byte) []byte {
	dst = wire.AppendUint(wire.AppendBool(appendCursor(dst, b.CountsCursor), b.More), uint64(b.Queues))
	dst = wire.AppendUint(dst, uint64(len(b.Counts)))
	for i := range b.Counts {
		qc := &b.Counts[i]
		dst = wire.AppendBytes(dst, qc.Queue)
		dst = (&keys.CountersValue{Counts: qc.Counts}).Append(dst)
	}
	return dst
}

func (b *Stats) ReadReply(r *wire.Reader) {
	b.CountsCursor, b.More, b.Queues = readCursor(r), r.Bool(), int(r.Uint32())
	for range r.Count(1 + keys.CountersLen) {
		name := r.String()
		v, err := keys.ParseCounters(r.Take(keys.CountersLen))
		if err != nil {
			r.Fail()
			return
		}
		b.Counts = append(b.Counts, engine.QueueCounts{Queue: name, Counts: v.Counts})
	}
}

func (b *Stats) Again() { b.Counts, b.CountsCursor = b.Counts[:0], b.from }
