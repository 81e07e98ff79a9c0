package manifest

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/integrity"
	"codeq/internal/platform"
)

// Place identifies the manifest file of an open queue: from before the first write to a store until
// all stores are closed and sealed. Files copied meanwhile, one after the other, have states of
// different times, although each of them may be complete. The record of a store identifies the
// store's files. A clone of the whole file system has the state of one time, as after a power loss,
// and the same places.
type Place struct {
	Manifest uint64 `json:"manifest,omitempty"` // the inode; 0: not known
	Born     int64  `json:"born,omitempty"`     // as platform.FileID
}

// RefuseCopy refuses files copied while the queue was open, or after its process had died; and
// stores of another opening than the manifest's.
func (d *Directory) RefuseCopy() error {
	what, err := d.copied()
	if err != nil || what == "" {
		return err
	}
	return fmt.Errorf("%w: %s: its files may have states of different times (Checkpoint makes a good copy; AcceptCopy accepts this one)",
		base.ErrCopied, what)
}

// copied returns the evidence that files were copied; "": there is none.
func (d *Directory) copied() (what string, err error) {
	inodes := vfs.Root(d.FS) == vfs.Default
	if d.Open != nil && inodes {
		now, err := platform.IdentifyFile(d.FS.PathJoin(d.Path, Name))
		if err != nil {
			return "", err
		}
		if now.Differs(platform.FileID{Number: d.Open.Manifest, Born: d.Open.Born}) {
			return Name + " is not the recorded file", nil
		}
	}
	if d.Opening == 0 {
		return "", nil
	}
	for _, dir := range d.stores() {
		r, err := d.recordOf(dir)
		if err != nil {
			return "", err
		}
		if r == nil {
			continue
		}
		store := d.FS.PathBase(dir)
		switch {
		case r.Opening == d.Opening:
		case d.Open != nil && r.Opening == d.Opening-1: // unchanged since
			continue
		default:
			return fmt.Sprintf("%s was written in opening %d, and %s in opening %d", store, r.Opening, Name, d.Opening), nil
		}
		if d.Open == nil || !inodes {
			continue
		}
		if name, err := r.differs(dir); err != nil || name != "" {
			return fmt.Sprintf("%s in %s is not the recorded file", name, store), err
		}
	}
	return "", nil
}

// nextOpening returns the number of a new opening. If the last one has not reached every store, the
// queue was never usable in it, and its number is used again: so the number of a store is at most
// one less than that of the manifest.
func (d *Directory) nextOpening() (uint64, error) {
	last, reached := d.Opening, true
	for _, dir := range d.stores() {
		r, err := d.recordOf(dir)
		if err != nil {
			return 0, err
		}
		reached = reached && r != nil && r.Opening == d.Opening
		if r != nil {
			last = max(last, r.Opening)
		}
	}
	if d.Open != nil && !reached && last == d.Opening {
		return max(last, 1), nil
	}
	return last + 1, nil
}

// Take begins to write a directory; copied: it may be a copy. boot is the boot of the machine, ""
// if it is not known; volatile describes the durability of acknowledged data from now on, nil: on
// the disk.
func (d *Directory) Take(copied bool, boot string, volatile *Volatile) error {
	err := d.RefuseCopy()
	if err != nil && !copied {
		return err
	}
	d.volatile = volatile
	if d.Node == "" || len(d.Founders) > 0 {
		d.doubt(err != nil, boot, volatile)
	}
	if d.Node != "" {
		d.renew(boot, volatile)
	}
	return d.Begin()
}

// Killed reports whether the application's previous process has died, or could not close the
// directory in order. It is false for a tool. REQUIRES: Take has been called.
func (d *Directory) Killed() bool { return d.killed && !d.Tool }

// Begin durably opens the directory for writing: in the current format, or, for a node, in a new
// incarnation.
func (d *Directory) Begin() (err error) {
	if !d.begun {
		d.begun, d.killed = true, d.Crashed || d.Open != nil
		d.Crashed = d.killed && d.Node == ""
	}
	if d.Node != "" {
		d.BeginIncarnation()
	} else {
		d.Format = Format
	}
	if d.Opening, err = d.nextOpening(); err != nil {
		return err
	}
	d.Open = new(Place)
	if err := d.Write(); err != nil {
		return err
	}
	if d.Opening != 0 && d.hold != nil {
		d.hold.opening.Store(&record{Queue: d.ID, Opening: d.Opening})
	}
	return nil
}

// End records that all stores are closed, if they are, so that files may be copied. REQUIRES: Begin
// has been called.
func (d *Directory) End() error {
	if d.Creating || d.Open == nil {
		return nil
	}
	if d.hold.checkAll() != nil {
		return nil // Close returns the error; the queue stays unclosed
	}
	closed, err := d.IsClosed()
	if err != nil {
		return err
	}
	if !closed {
		if d.Node != "" || d.volatile == nil {
			return nil
		}
		d.Volatile = new(Volatile) // a failed store may lack acknowledged data
		return d.Write()
	}
	if d.Opening > 0 && !d.hold.opened.Load() {
		d.Opening-- // so that a missing or replaced store may be restored
	}
	if err := d.countStores(); err != nil {
		return err
	}
	d.Crashed = d.Crashed && (d.Tool || d.hold.recovered == nil || !d.hold.recovered())
	d.Open, d.Volatile = nil, nil
	return d.Write()
}

// Opened records that all stores are open, and that calls may change them. Without it, End restores
// the number of the previous opening. A node may change its manifest meanwhile. recovered reports
// to End whether all tasks that were running in the last crash have been recovered.
func (d *Directory) Opened(recovered func() bool) {
	d.hold.recovered = recovered
	d.hold.opened.Store(true)
}

// countStores writes the number of the opening into the records of all stores.
func (d *Directory) countStores() error {
	if d.Opening == 0 {
		return nil
	}
	for _, dir := range d.stores() {
		r, err := d.recordOf(dir)
		if err != nil {
			return err
		}
		if r != nil && r.Opening == d.Opening {
			continue
		}
		r = &record{Queue: d.ID, Opening: d.Opening}
		if err := errors.Join(r.write(d.FS, dir, false, true), platform.SyncDirectory(d.FS, dir)); err != nil {
			return err
		}
	}
	return nil
}

// IsClosed reports whether all stores were closed in order: each is sealed.
func (d *Directory) IsClosed() (bool, error) {
	for _, dir := range d.stores() {
		if sealed, err := integrity.IsSealed(d.FS, dir); err != nil || !sealed {
			return false, err
		}
	}
	return true, nil
}

// stores returns the directories of all stores.
func (d *Directory) stores() []string {
	var dirs []string
	for i := range d.Shards {
		dirs = append(dirs, ShardDir(d.FS, d.Path, i))
	}
	if d.Node != "" {
		dirs = append(dirs, d.FS.PathJoin(d.Path, RaftDir))
	}
	return dirs
}

// settle sets the place in the manifest before it is written to a file.
func (d *Directory) settle(file string) error {
	if d.Open == nil || vfs.Root(d.FS) != vfs.Default {
		return nil
	}
	id, err := platform.IdentifyFile(file)
	if err != nil {
		return err
	}
	d.Open = &Place{Manifest: id.Number, Born: id.Born}
	return nil
}
