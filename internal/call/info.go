package call

import (
	"cmp"
	"maps"
	"slices"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// infoStep is how many queues and lanes a shard's owner visits in one group.
const infoStep = 1024

// Info copies the statistics of a part of a shard's queues.
type Info struct {
	engine.InfoCursor
	Settings bool // are copied, too
	Infos    []engine.QueueInfo
	More     bool              // there are queues after the place
	from     engine.InfoCursor // where this part begins
}

// next prepares to copy the next part.
func (b *Info) next() { b.Infos, b.from = b.Infos[:0], b.InfoCursor }

func (b *Info) Decide(s *engine.State) (v engine.Verdict, _ error) {
	b.Infos, b.More, v = s.Names.Info(&b.InfoCursor, infoStep, b.Infos)
	if !b.Settings {
		for i := range b.Infos {
			b.Infos[i].Settings = nil
		}
	}
	return v, nil
}

func (b *Info) Append(dst []byte) []byte {
	return wire.AppendBool(appendInfoCursor(dst, &b.InfoCursor), b.Settings)
}

func (b *Info) Read(r *wire.Reader) {
	b.InfoCursor = readInfoCursor(r)
	b.Settings = r.Bool()
}

func appendInfoCursor(dst []byte, p *engine.InfoCursor) []byte {
	dst = wire.AppendBytes(appendCursor(dst, p.CountsCursor), p.Queue)
	return wire.AppendUint(wire.AppendUint(dst, uint64(p.Lanes)), p.Oldest)
}

func readInfoCursor(r *wire.Reader) engine.InfoCursor {
	return engine.InfoCursor{CountsCursor: readCursor(r), Queue: r.String(), Lanes: int(r.Uint32()), Oldest: r.Uint()}
}

func (b *Info) AppendReply(dst []byte) []byte {
	dst = appendInfos(wire.AppendBool(appendInfoCursor(dst, &b.InfoCursor), b.More), b.Infos)
	for i := range b.Infos {
		dst = wire.AppendUint(dst, b.Infos[i].Held)
	}
	return appendUnhandled(dst, b.Infos)
}

func (b *Info) ReadReply(r *wire.Reader) {
	b.InfoCursor, b.More = readInfoCursor(r), r.Bool()
	known := len(b.Infos)
	b.Infos = readInfos(r, b.Infos)
	for i := known; i < len(b.Infos); i++ {
		b.Infos[i].Held = r.Uint()
	}
	readUnhandled(r, b.Infos[known:])
}

func appendInfos(dst []byte, infos []engine.QueueInfo) []byte {
	dst = wire.AppendUint(dst, uint64(len(infos)))
	for i := range infos {
		q := &infos[i]
		dst = wire.AppendUint(wire.AppendBytes(dst, q.Queue), q.Oldest)
		c := &q.Counts
		for _, n := range [...]uint64{c.Ready, c.Scheduled, c.Blocked, c.Leased, c.Dead, c.Done, c.Canceled} {
			dst = wire.AppendUint(dst, n)
		}
		for _, n := range q.Totals[:keys.EventKinds] {
			dst = wire.AppendUint(dst, n)
		}
		dst = wire.AppendBytes(dst, q.Settings)
	}
	return dst
}

func readInfos(r *wire.Reader, infos []engine.QueueInfo) []engine.QueueInfo {
	for range r.Count(3 + 7 + keys.EventKinds) {
		q := engine.QueueInfo{Queue: r.String(), Oldest: r.Uint()}
		c := &q.Counts
		for _, n := range [...]*uint64{&c.Ready, &c.Scheduled, &c.Blocked, &c.Leased, &c.Dead, &c.Done, &c.Canceled} {
			*n = r.Uint()
		}
		for i := range keys.EventKinds {
			q.Totals[i] = r.Uint()
		}
		if set := r.Bytes(); len(set) > 0 {
			q.Settings = set
		}
		infos = append(infos, q)
	}
	return infos
}

// appendUnhandled ends an answer with the totals that not all formats have, if there are any.
func appendUnhandled(dst []byte, infos []engine.QueueInfo) []byte {
	if !slices.ContainsFunc(infos, func(q engine.QueueInfo) bool { return q.Totals[keys.Unhandled] != 0 }) {
		return dst
	}
	for i := range infos {
		dst = wire.AppendUint(dst, infos[i].Totals[keys.Unhandled])
	}
	return dst
}

// readUnhandled reads what appendUnhandled has appended.
func readUnhandled(r *wire.Reader, infos []engine.QueueInfo) {
	if r.Len() == 0 {
		return
	}
	for i := range infos {
		infos[i].Totals[keys.Unhandled] = r.Uint()
	}
}

func (b *Info) Again() { b.Infos, b.InfoCursor = b.Infos[:0], b.from }

// Totals copies the counts and totals of queues.
type Totals struct {
	Names []string
	Infos []engine.QueueInfo // of the first of them
}

func (b *Totals) Decide(s *engine.State) (engine.Verdict, error) {
	b.Infos = s.Names.TotalsOf(b.Names, b.Infos[:0])
	return engine.Decided, nil
}

func (b *Totals) Append(dst []byte) []byte { return wire.AppendStrings(dst, b.Names) }
func (b *Totals) Read(r *wire.Reader)      { b.Names = r.Strings() }
func (b *Totals) AppendReply(dst []byte) []byte {
	return appendUnhandled(appendInfos(dst, b.Infos), b.Infos)
}

func (b *Totals) ReadReply(r *wire.Reader) {
	known := len(b.Infos)
	b.Infos = readInfos(r, b.Infos)
	readUnhandled(r, b.Infos[known:])
}

func (b *Totals) Again() { b.Infos = b.Infos[:0] }

// Days reads the totals of a queue by day.
type Days struct {
	Queue string
	Days  []keys.TotalsValue
}

func (b *Days) Decide(s *engine.State) (v engine.Verdict, _ error) {
	b.Days, v = s.Names.DaysOf(b.Queue, b.Days[:0])
	return v, nil
}

func (b *Days) Append(dst []byte) []byte { return wire.AppendBytes(dst, b.Queue) }
func (b *Days) Read(r *wire.Reader)      { b.Queue = r.String() }

func (b *Days) AppendReply(dst []byte) []byte {
	dst = wire.AppendUint(dst, uint64(len(b.Days)))
	for i := range b.Days {
		dst = b.Days[i].Append(dst)
	}
	return dst
}

func (b *Days) ReadReply(r *wire.Reader) {
	for range r.Count(1 + 2*keys.EventKinds) {
		b.Days = append(b.Days, keys.ReadTotals(r))
	}
}

func (b *Days) Again() { b.Days = nil }

// InfoSum is the sum of the shards' statistics of all queues. A shard shows the queues that have
// tasks in it: afterwards it is asked for its totals of the queues that only other shards show.
type InfoSum struct {
	Queues []engine.QueueInfo
	at     map[string]int // index in Queues
	seen   [][]bool       // by shard and index
}

// NewInfoSum returns an empty sum.
func NewInfoSum(shards int) *InfoSum {
	return &InfoSum{at: make(map[string]int), seen: make([][]bool, shards)}
}

// Gather adds the statistics of a shard, part by part: ask carries out part there.
func (s *InfoSum) Gather(shard int, part *Info, ask func() error) error {
	return inParts(&part.More, part.next, ask, func() { s.add(shard, part.Infos) })
}

// Complete adds the totals of the queues that a shard has not shown.
func (s *InfoSum) Complete(shard int, ask func(*Totals) error) error {
	for names := s.unseen(shard); len(names) > 0; {
		part := &Totals{Names: names[:min(infoStep, len(names))]}
		if err := ask(part); err != nil {
			return err
		}
		s.add(shard, part.Infos)
		names = names[len(part.Infos):]
	}
	return nil
}

// add adds a shard's statistics of some queues.
func (s *InfoSum) add(shard int, infos []engine.QueueInfo) {
	for i := range infos {
		of := &infos[i]
		n, known := s.at[of.Queue]
		if !known {
			n = len(s.Queues)
			s.at[of.Queue] = n
			s.Queues = append(s.Queues, engine.QueueInfo{Queue: of.Queue})
		}
		sum := &s.Queues[n]
		sum.Counts.Add(of.Counts)
		sum.Held += of.Held
		for kind, count := range of.Totals {
			sum.Totals[kind] += count
		}
		if of.Oldest > 0 && (sum.Oldest == 0 || of.Oldest < sum.Oldest) {
			sum.Oldest = of.Oldest
		}
		if of.Settings != nil {
			sum.Settings = of.Settings
		}
		if seen := &s.seen[shard]; n >= len(*seen) {
			*seen = append(*seen, make([]bool, n+1-len(*seen))...)
		}
		s.seen[shard][n] = true
	}
}

// unseen returns the queues that a shard has not shown.
func (s *InfoSum) unseen(shard int) (names []string) {
	seen := s.seen[shard]
	for n := range s.Queues {
		if n >= len(seen) || !seen[n] {
			names = append(names, s.Queues[n].Queue)
		}
	}
	return names
}

// Sorted returns the queues in the order of their names. Nothing is added after it.
func (s *InfoSum) Sorted() []engine.QueueInfo {
	slices.SortFunc(s.Queues, func(a, b engine.QueueInfo) int { return cmp.Compare(a.Queue, b.Queue) })
	return s.Queues
}

// SumDays adds up what shards answer, in the order of the days.
func SumDays(parts []Days) []keys.TotalsValue {
	sum := make(map[uint32]keys.TotalsValue)
	for i := range parts {
		for _, v := range parts[i].Days {
			of := sum[v.Day]
			of.Day = v.Day
			for kind, n := range v.OfDay {
				of.OfDay[kind] += n
			}
			if of.OfDay != (keys.Totals{}) {
				sum[v.Day] = of
			}
		}
	}
	return slices.SortedFunc(maps.Values(sum), func(a, b keys.TotalsValue) int { return cmp.Compare(a.Day, b.Day) })
}
