package codeq

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// Unique is the idempotency key of a task. Of the tasks of a queue and tenant
// (and of a Group and LimitKey, if they have one) a key is held by one at a
// time. Whoever produces another one with the same key gets the ID of the
// holder, with ErrDuplicate, or replaces it.
//
// A key is taken as long as its task is ready, scheduled, blocked or leased,
// and at least for the time that For gives. It outlives restarts.
type Unique struct {
	// Key is the idempotency key. "": the task has none, and the other fields
	// have no meaning.
	Key string
	// For is how long after its produce the key is taken at least, whatever
	// becomes of the task: by the clock in the task's ID, so that a wall clock
	// that is set back makes it longer. 0: until the task has ended.
	For time.Duration
	// Replace has the new task take the place of one that still waits (ready,
	// scheduled or blocked): the ID stays, and so do After and OnDead; everything
	// else is that of the new task, which has all its attempts before it, waits
	// anew and, when ready, behind the others. So a task that is produced again
	// and again for a moment later runs once, when it is quiet. A task that is
	// leased is not replaced: the new one is refused with ErrDuplicate.
	Replace bool
	// ReleaseOnComplete and ReleaseOnDead end For when the task is completed,
	// or becomes a dead letter.
	ReleaseOnComplete bool
	ReleaseOnDead     bool
}

// DuplicateError says that an idempotency key is taken. It matches ErrDuplicate.
type DuplicateError struct {
	Key string
	ID  ID // of the task that has the key
	// Index is the task's place in the batch.
	Index int
}

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("codeq: idempotency key %q is taken by task %s", e.Key, e.ID)
}

// Is reports that every DuplicateError is an ErrDuplicate.
func (e *DuplicateError) Is(target error) bool { return target == ErrDuplicate }

// The flags of a stored idempotency key.
const (
	releaseOnComplete = 1 << iota
	releaseOnDead
	replaceWaiting
	// holdsKey: until the task ends, it holds its key. ReleaseKey takes it from a task that has not ended, so that
	// the end of a task need not look up whose the key is. A task without it may hold its key.
	holdsKey
)

// flags are those of a new task, which is stored only if its key is free.
func (u *Unique) flags() (f uint8) {
	if u.Key != "" {
		f = holdsKey
	}
	if u.ReleaseOnComplete {
		f |= releaseOnComplete
	}
	if u.ReleaseOnDead {
		f |= releaseOnDead
	}
	if u.Replace {
		f |= replaceWaiting
	}
	return f
}

func uniqueOf(r *record.Record) Unique {
	if r.UniqueKey == "" {
		return Unique{}
	}
	return Unique{
		Key: r.UniqueKey, For: duration(r.UniqueFor),
		Replace:           r.Flags&replaceWaiting != 0,
		ReleaseOnComplete: r.Flags&releaseOnComplete != 0,
		ReleaseOnDead:     r.Flags&releaseOnDead != 0,
	}
}

func (u *Unique) check(l *Limits) error {
	if u.Key == "" {
		if *u != (Unique{}) {
			return &InvalidError{"Task.Unique.Key", `""`, "a key, if other fields of Unique are set"}
		}
		return nil
	}
	if err := checkName("Task.Unique.Key", u.Key, l.Name); err != nil {
		return err
	}
	if u.For < 0 {
		return &InvalidError{"Task.Unique.For", u.For, "0 or more"}
	}
	return nil
}

// hash is SHA-256 over what tells a scope from every other.
func hash(kind string, parts ...string) [sha256.Size]byte {
	b := append(make([]byte, 0, 256), kind...) // on the stack, if that is enough
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return sha256.Sum256(b)
}

// The last bit of a scope tells those of groups from those of limits.
const groupBit = 1

func scopeOf(h [sha256.Size]byte) uint64 { return binary.BigEndian.Uint64(h[:])&^groupBit | 2 }

func (t *Task) limitScope() uint64 {
	if t.LimitKey == "" {
		return 0
	}
	return scopeOf(hash("limit", t.Queue, t.LimitKey))
}

func (t *Task) groupScope() uint64 {
	if t.Group == "" {
		return 0
	}
	return scopeOf(hash("group", t.Queue, t.Tenant, t.LimitKey, t.Group)) | groupBit
}

func (t *Task) uniqueHash() [keys.UniqueLen]byte {
	h := hash("unique", t.Queue, t.Tenant, t.LimitKey, t.Group, t.Unique.Key)
	return [keys.UniqueLen]byte(h[:])
}

// homeOf says which shard a task belongs to: the widest of its scopes decides,
// so that all tasks of a scope lie together. Without one, any shard will do.
func homeOf(t *record.Ties, shards int) (shard int, bound bool) {
	h := t.Limit
	if h == 0 {
		h = t.Group
	}
	if h == 0 {
		h = binary.BigEndian.Uint64(t.Unique[:])
	}
	return int(h >> 2 % uint64(shards)), h != 0
}

// ReleaseKey frees the idempotency key of a task, whatever has become of the
// task. Of t, the queue, tenant, Group, LimitKey and Unique.Key say which key is
// meant. It returns ErrNotFound if nobody has it, and ErrDiskFull if the task goes on and there is no room
// to store that it does so without the key.
func (q *Queue) ReleaseKey(ctx context.Context, t Task) error {
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	if err := t.check(&q.opts.Limits); err != nil {
		return err
	}
	if t.Unique.Key == "" {
		return &InvalidError{"Task.Unique.Key", `""`, "a key"}
	}
	rec := t.record()
	home, _ := homeOf(&rec.Ties, len(q.replicas))
	op := &releaseKeyOp{completion: newCompletion(), hash: rec.Unique, key: t.Unique.Key}
	_, err := q.do(ctx, home, op)
	return err
}

type releaseKeyOp struct {
	completion
	hash [keys.UniqueLen]byte
	key  string
}

func (op *releaseKeyOp) resolve(s *shard) {
	v, ok := s.uniques.get(s, op.hash)
	if ok && s.isHolderMoving(op.hash, v.ID) {
		s.postponeOp(op)
		return
	}
	s.settle(op)
	if !ok {
		op.err = fmt.Errorf("%w: nobody has idempotency key %q", ErrNotFound, op.key)
		return
	}
	at, err := s.locateUnended(v.ID)
	if err != nil {
		s.broken = err
		return
	}
	if at != nil && at.rec.Flags&holdsKey != 0 {
		if !s.hasRoom(roomScarce) {
			op.err = s.errNoRoom()
			return
		}
		at.rec.Flags &^= holdsKey
		s.rewrite(at)
	}
	s.freeKey(op.hash, v)
}

func (op *releaseKeyOp) encode(dst []byte) (callKind, []byte) {
	return callReleaseKey, wire.AppendBytes(append(dst, op.hash[:]...), op.key)
}

func (op *releaseKeyOp) decode(r *wire.Reader) {
	copy(op.hash[:], r.Take(len(op.hash)))
	op.key = r.String()
}

// holder returns who has an idempotency key.
func (s *shard) holder(hash [keys.UniqueLen]byte) (id ID, taken bool) {
	if hash == [keys.UniqueLen]byte{} {
		return ID{}, false
	}
	v, ok := s.uniques.get(s, hash)
	return v.ID, ok
}

// isHolderMoving is isMoving for the task that has an idempotency key, which the group may have produced.
func (s *shard) isHolderMoving(hash [keys.UniqueLen]byte, id ID) bool {
	return s.isMoving(id) || s.uniques.hasChanged(hash) && s.group.find(id) == nil
}

// takeKey gives a key that is free to a task, for some time from a moment on,
// which is not before the one in the ID: endKey relies on it.
func (s *shard) takeKey(id ID, t *record.Ties, from uint64) {
	v := keys.UniqueValue{ID: id}
	if t.UniqueFor != 0 { // freeKeys looks at it when its time has passed, be it now
		v.Until = later(from, t.UniqueFor)
		s.scratch = keys.AppendFreed(s.scratch[:0], v.Until, t.Unique)
		s.group.set(s.scratch, nil)
		s.nextFreed.lower(v.Until, t.Unique)
	}
	s.uniques.put(s, t.Unique, v)
}

// freeKey takes a key from its holder.
func (s *shard) freeKey(hash [keys.UniqueLen]byte, v keys.UniqueValue) {
	s.uniques.drop(s, hash)
	if v.Until != 0 {
		s.group.delete(keys.AppendFreed(nil, v.Until, hash))
	}
}

// endKey is what becomes of the key of a task that ends. Until the shard's clock
// has passed its time there is nothing to do: freeKeys will find that the task
// has ended.
func (s *shard) endKey(id ID, t *record.Ties, release uint8) {
	if t.Flags&release == 0 && t.UniqueFor != 0 && later(mintedAt(id), t.UniqueFor) > s.mint.clock>>clockShift {
		return
	}
	if t.Flags&holdsKey != 0 && t.UniqueFor == 0 {
		s.uniques.dropBlind(t.Unique)
		return
	}
	v, ok := s.uniques.get(s, t.Unique)
	if !ok || v.ID != keys.ID(id) { // released, and perhaps taken by another task
		return
	}
	if v.Until == 0 || t.Flags&release != 0 {
		s.freeKey(t.Unique, v)
	}
}

func mintedAt(id ID) uint64 { return keys.SinceMillis(keys.SinceOf(keys.ID(id))) }

// later is a time of the wall clock after a number of milliseconds, or never.
func later(wall, ms uint64) uint64 {
	if ms > never-wall {
		return never
	}
	return wall + ms
}

// freeKeys looks at idempotency keys whose time has passed: those of tasks that
// have ended are free, the others when their tasks end.
// REQUIRES: the group has ended no task.
func (s *shard) freeKeys() {
	lower := keys.AppendFreed(nil, s.nextFreed.at, s.nextFreed.name)
	_, upper := keys.Range(keys.Freed)
	s.nextFreed = nothingDue
	s.broken = s.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		at, hash, err := keys.ParseFreed(it.Key())
		if err != nil {
			return false, err
		}
		if at > s.wall || s.spent() {
			s.nextFreed.lower(at, hash)
			return false, nil
		}
		s.group.delete(it.Key())
		v, ok := s.uniques.get(s, hash)
		if !ok || v.Until != at {
			return false, fmt.Errorf("idempotency key %x is free at %d, and is %+v", hash, at, v)
		}
		if lives, err := s.lives(v.ID); err != nil {
			return false, err
		} else if lives { // endKey finds out by the shard's clock, which never goes back
			v.Until = 0
			s.uniques.put(s, hash, v)
			s.mint.next()
			l, err := s.laneNumbered(keys.LaneOf(v.ID))
			if err != nil {
				return false, err
			}
			s.touch(l.queue)
		} else {
			s.uniques.drop(s, hash)
		}
		return true, nil
	})
}

func (s *shard) freeKeysIsDue() bool { return s.nextFreed.at <= s.wall }

// lives reports whether a task has not ended.
// REQUIRES: disk is not behind with the task.
func (s *shard) lives(id ID) (bool, error) {
	if s.leases.byID[id] != nil {
		return true, nil
	}
	p, indexed, err := placeOf(s.store.DB(), id)
	if err != nil || indexed {
		return indexed, err
	}
	_, closer, err := s.store.DB().Get(p.AppendKey(nil, id))
	if err == pebble.ErrNotFound {
		return false, nil
	}
	if err != nil {
		return false, store.Error(err)
	}
	return true, closer.Close()
}
