package snapshot

import (
	"errors"
	"fmt"

	"codeq/internal/platform"
)

// Sink receives one snapshot: a local one by Persist, or an installed one by writing the manifest
// of received files. Close publishes it. It refuses a snapshot with neither, which would promise a
// state that does not exist.
//
// One goroutine at a time uses a sink. After Close or Cancel, both do nothing, and Close returns
// its earlier result.
type Sink struct {
	store  *Store
	record record

	live     Live   // set by Persist
	installs uint64 // set by Persist; see Store.begin
	manifest []byte // set by Write
	done     bool
	err      error
}

// ID returns the snapshot's ID, for Open.
func (k *Sink) ID() string { return k.record.Meta.ID }

// Persist makes the state of live durable, for a local snapshot. FSMSnapshot.Persist calls it. live
// is the result of the store's live function when FSM.Snapshot was called; if it was replaced
// since, Persist fails with errSuperseded.
func (k *Sink) Persist(live Live) error {
	if k.done || k.manifest != nil || k.live != nil {
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

// Write takes the next part of a manifest, in pieces of any size.
func (k *Sink) Write(p []byte) (int, error) {
	if k.done || k.live != nil {
		return 0, errors.New("snapshot: write into a sink that has been used")
	}
	if len(k.manifest)+len(p) > maxManifest {
		return 0, fmt.Errorf("snapshot: receive %s: %w: the manifest is too long", k.ID(), ErrDamaged)
	}
	k.manifest = append(k.manifest, p...)
	return len(p), nil
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
	case k.manifest != nil:
		return k.install()
	default:
		return fmt.Errorf("%w: neither persisted nor received", ErrDamaged)
	}
}

// install publishes the files that the manifest lists. Before that it makes their new name durable;
// the files are durable already.
func (k *Sink) install() error {
	m, err := parseManifest(k.manifest)
	if err != nil {
		return err
	}
	if m.index != k.record.Meta.Index || m.term != k.record.Meta.Term {
		return fmt.Errorf("%w: the manifest is that of index %d, term %d", ErrDamaged, m.index, m.term)
	}
	files, err := k.store.adopt(k.manifest)
	if err != nil {
		return err
	}
	k.record.Installed = true
	dir, written := k.store.fs.PathJoin(k.store.dir, incomingName(k.record.Sequence)), false
	if err = k.store.fs.Rename(files.dir, dir); err != nil {
		dir = files.dir
	} else if err = platform.SyncDirectory(k.store.fs, k.store.dir); err == nil {
		written, err = k.store.publish(&k.record, 0)
	}
	if err != nil && !written {
		k.store.remove(dir)
	}
	return err
}

// Cancel drops the snapshot.
func (k *Sink) Cancel() error {
	if !k.done {
		k.done = true
		k.err = fmt.Errorf("snapshot: %s has been canceled", k.ID())
	}
	return nil
}
