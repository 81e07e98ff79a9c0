package snapshot

import (
	"errors"
	"fmt"
)

// Sink takes one snapshot: a local one by Persist, or an installed one by writing a stream of
// [Store.Open]. Close publishes it. It refuses a snapshot with neither, which would promise a state
// that does not exist.
//
// One goroutine at a time uses a sink. After Close or Cancel, both do nothing, and Close returns
// what it returned before.
type Sink struct {
	store  *Store
	record record

	live     Live      // set by Persist
	installs uint64    // set by Persist; see Store.begin
	stream   *unpacker // set by the first Write
	done     bool
	err      error
}

// ID returns the snapshot's ID, for Open.
func (k *Sink) ID() string { return k.record.Meta.ID }

// Persist makes the state of live durable, for a local snapshot. FSMSnapshot.Persist calls it. live
// is what the store's live function returned when FSM.Snapshot was called; if it was replaced
// since, Persist fails with [ErrSuperseded].
func (k *Sink) Persist(live Live) error {
	if k.done || k.stream != nil || k.live != nil {
		return errors.New("snapshot: persist into a sink that has been used")
	}
	if live == nil {
		return ErrNotLive
	}
	installs, err := k.store.begin(live)
	if err != nil {
		return fmt.Errorf("snapshot: persist %s: %w", k.ID(), err)
	}
	if err := live.Flush(); err != nil {
		return fmt.Errorf("snapshot: persist %s: %w", k.ID(), err)
	}
	k.live, k.installs = live, installs
	return nil
}

// Write takes the next part of a stream, in pieces of any size. A damaged stream fails with
// [ErrDamaged].
func (k *Sink) Write(p []byte) (int, error) {
	if k.done || k.live != nil {
		return 0, errors.New("snapshot: write into a sink that has been used")
	}
	if k.stream == nil {
		dir := k.store.fs.PathJoin(k.store.dir, incomingName(k.record.Sequence))
		if err := k.store.fs.MkdirAll(dir, 0o755); err != nil {
			return 0, fmt.Errorf("snapshot: receive %s: %w", k.ID(), err)
		}
		k.stream = newUnpacker(k.store.fs, dir)
	}
	n, err := k.stream.Write(p)
	if err != nil {
		return n, fmt.Errorf("snapshot: receive %s: %w", k.ID(), err)
	}
	return n, nil
}

// Close publishes the snapshot. If it fails, nothing of the snapshot remains, unless the metadata
// was written and only its durability is uncertain.
func (k *Sink) Close() error {
	if k.done {
		return k.err
	}
	k.done = true
	if err := k.publish(); err != nil {
		k.err = fmt.Errorf("snapshot: close %s: %w", k.ID(), err)
	}
	return k.err
}

func (k *Sink) publish() error {
	switch {
	case k.live != nil:
		_, err := k.store.publish(&k.record, k.installs)
		return err
	case k.stream != nil:
		return k.install()
	default:
		return fmt.Errorf("%w: neither persisted nor received", ErrDamaged)
	}
}

// install makes the received directory, and its name, durable before the metadata that refers to
// it.
func (k *Sink) install() error {
	k.record.Installed = true
	err := k.stream.finish()
	if err == nil {
		err = syncDir(k.store.fs, k.store.dir)
	}
	written := false
	if err == nil {
		written, err = k.store.publish(&k.record, 0)
	}
	if err != nil && !written {
		k.store.remove(k.stream.dir)
	}
	return err
}

// Cancel drops the snapshot.
func (k *Sink) Cancel() error {
	if k.done {
		return nil
	}
	k.done = true
	k.err = fmt.Errorf("snapshot: %s has been canceled", k.ID())
	if k.stream != nil {
		k.stream.abandon()
		k.store.remove(k.stream.dir)
	}
	return nil
}
