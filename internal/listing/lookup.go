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
