package listing

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// Lookup is a read of a shard, or a part of one.
type Lookup interface {
	// Visit is called by the owner right after it has taken v, and adds data from memory.
	Visit(rules *engine.State, v *store.Snapshot)
	// Look reads, and may end with an error when stop returns true. again: another visit of the
	// owner is needed, with another snapshot.
	Look(v *store.Snapshot, stop func() bool) (again bool, err error)
}

// One looks up a task, by its ID or by its idempotency key.
type One[T any] struct {
	ID    keys.ID
	ByKey bool // ID is that of the holder of Key, once it is known
	Key   [keys.UniqueLen]byte
	Task  *T
	show  func(*store.Task) *T
}

// NewOne returns a lookup. show converts the task.
func NewOne[T any](byKey bool, show func(*store.Task) *T) *One[T] {
	return &One[T]{ByKey: byKey, show: show}
}

// Visit adds the lease of the task.
func (o *One[T]) Visit(rules *engine.State, v *store.Snapshot) { addLease(v, rules, o.ID) }

// Look reads the task. The error matches base.ErrNotFound if there is none.
func (o *One[T]) Look(v *store.Snapshot, _ func() bool) (again bool, err error) {
	var t *store.Task
	if o.ByKey {
		t, o.ID, err = v.GetByKey(o.Key, o.ID)
	} else {
		t, err = v.Get(o.ID)
	}
	if t != nil {
		o.Task = o.show(t)
	}
	return t == nil && err == nil, err
}

// Append appends the ID or the key.
func (o *One[T]) Append(dst []byte) []byte { return append(dst, o.sent()...) }

func (o *One[T]) sent() []byte {
	if o.ByKey {
		return o.Key[:]
	}
	return o.ID[:]
}

func (o *One[T]) Read(r *wire.Reader) {
	to := o.sent()
	copy(to, r.Take(len(to)))
}

// AppendReply appends the task.
func (o *One[T]) AppendReply(dst []byte) []byte { return wire.AppendJSON(dst, o.Task) }

// ReadReply refuses a reply without a task.
func (o *One[T]) ReadReply(r *wire.Reader) {
	if r.JSON(r.Rest(), &o.Task); o.Task == nil {
		r.Fail()
	}
}

// Again forgets the holder that one leader has found.
func (o *One[T]) Again() {
	if o.ByKey {
		o.ID = keys.ID{}
	}
}

// ManyTasks is how many tasks a Many has at the most, as its owner looks for the lease of each.
// ManyBytes is about the size of its reply.
const (
	ManyTasks = 1024
	ManyBytes = 4 << 20
)

// Many looks up tasks by their IDs.
type Many[T any] struct {
	IDs   []keys.ID
	Tasks []*T // of the first of IDs, at least one; nil: there is none
	show  func(*store.Task) *T
}

// NewMany returns a lookup of tasks. show converts one.
func NewMany[T any](show func(*store.Task) *T) *Many[T] { return &Many[T]{show: show} }

// Visit adds the leases of the tasks.
func (m *Many[T]) Visit(rules *engine.State, v *store.Snapshot) {
	for _, id := range m.IDs {
		addLease(v, rules, id)
	}
}

// Look reads the tasks until there are ManyBytes of them, without their steps, cursors and logs.
func (m *Many[T]) Look(v *store.Snapshot, _ func() bool) (again bool, err error) {
	for bytes := 0; len(m.Tasks) < len(m.IDs) && bytes < ManyBytes; {
		id := m.IDs[len(m.Tasks)]
		p, value, err := v.Find(id)
		if err != nil {
			return false, err
		}
		if value == nil {
			m.Tasks = append(m.Tasks, nil)
			continue
		}
		t, err := v.Task(id, p, value)
		if err != nil {
			return false, err
		}
		t.Record.Notes = t.Record.Notes.WithoutLogs()
		if t.Lease != nil {
			t.Lease.Notes = t.Lease.Notes.WithoutLogs()
		}
		m.Tasks = append(m.Tasks, m.show(t))
		bytes += len(value)
	}
	return false, nil
}

// Append appends the IDs.
func (m *Many[T]) Append(dst []byte) []byte { return keys.AppendIDs(dst, m.IDs) }

func (m *Many[T]) Read(r *wire.Reader) {
	if m.IDs = keys.ReadIDs(r); len(m.IDs) == 0 || len(m.IDs) > ManyTasks {
		r.Fail()
	}
}

// AppendReply appends the tasks.
func (m *Many[T]) AppendReply(dst []byte) []byte { return wire.AppendJSON(dst, m.Tasks) }

// ReadReply refuses a reply without a task, or with too many.
func (m *Many[T]) ReadReply(r *wire.Reader) {
	if r.JSON(r.Rest(), &m.Tasks); len(m.Tasks) == 0 || len(m.Tasks) > len(m.IDs) {
		r.Fail()
	}
}

// Again forgets the tasks.
func (m *Many[T]) Again() { m.Tasks = nil }

// Parts looks up tasks of all shards, by many lookups. Calls of Read may run at the same time.
type Parts[T any, ID ~[keys.IDLen]byte] struct {
	Tasks []*T // of the IDs, in their order; nil: there is none
	ids   []ID
	at    [][]int // by shard: the indices of its tasks
	show  func(*store.Task) *T
}

// NewParts returns the lookup of tasks. show converts one.
func NewParts[T any, ID ~[keys.IDLen]byte](ids []ID, shards int, show func(*store.Task) *T) *Parts[T, ID] {
	p := &Parts[T, ID]{make([]*T, len(ids)), ids, make([][]int, shards), show}
	for i, id := range ids {
		shard := keys.ShardOf(keys.ID(id), shards)
		p.at[shard] = append(p.at[shard], i)
	}
	return p
}

// Read looks up the tasks of a shard.
func (p *Parts[T, ID]) Read(shard int, read func(*Many[T]) error) error {
	for rest := p.at[shard]; len(rest) > 0; {
		m := NewMany(p.show)
		for _, i := range rest[:min(len(rest), ManyTasks)] {
			m.IDs = append(m.IDs, keys.ID(p.ids[i]))
		}
		if err := read(m); err != nil {
			return err
		}
		for n, t := range m.Tasks {
			p.Tasks[rest[n]] = t
		}
		rest = rest[len(m.Tasks):]
	}
	return nil
}
