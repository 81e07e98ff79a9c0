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
	engine.Place
	Counts []engine.QueueCounts
	More   bool         // there are queues after the place
	Queues int          // about how many queues there are
	from   engine.Place // where this part begins
}

// Next prepares to copy the next part.
func (b *Stats) Next() { b.Counts, b.from = b.Counts[:0], b.Place }

func (b *Stats) Decide(s *engine.State) (engine.Verdict, error) {
	b.Counts, b.More = s.Counts(&b.Place, StatsStep, b.Counts)
	b.Queues = len(s.Queues)
	return engine.Decided, nil
}

func (b *Stats) Append(dst []byte) []byte { return appendPlace(dst, b.Place) }
func (b *Stats) Read(r *wire.Reader)      { b.Place = readPlace(r) }

func appendPlace(dst []byte, p engine.Place) []byte {
	return wire.AppendUint(wire.AppendUint(wire.AppendBool(dst, p.Unnumbered), uint64(p.Next)), p.Begun)
}

func readPlace(r *wire.Reader) engine.Place {
	return engine.Place{Unnumbered: r.Bool(), Next: int(r.Uint32()), Begun: r.Uint()}
}

func (b *Stats) AppendReply(dst []byte) []byte {
	dst = wire.AppendUint(wire.AppendBool(appendPlace(dst, b.Place), b.More), uint64(b.Queues))
	dst = wire.AppendUint(dst, uint64(len(b.Counts)))
	for i := range b.Counts {
		qc := &b.Counts[i]
		dst = wire.AppendBytes(dst, qc.Queue)
		var counters [keys.CountersLen]byte
		keys.CountersValue{Counts: qc.Counts}.Put(counters[:])
		dst = append(dst, counters[:]...)
	}
	return dst
}

func (b *Stats) ReadReply(r *wire.Reader) {
	b.Place, b.More, b.Queues = readPlace(r), r.Bool(), int(r.Uint32())
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

func (b *Stats) Again() { b.Counts, b.Place = b.Counts[:0], b.from }
