package manifest

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/integrity"
	"codeq/internal/platform"
)

// Place identifies the manifest of an open queue: from before the first store is written until all
// are closed and sealed. Files that are copied meanwhile, one after the other, are of different
// moments, although each of them may be whole. Those of a store are identified by its record. A
// clone of the whole file system is of one moment, like the state after a power loss, and has the
// same places.
type Place struct {
	Manifest uint64 `json:"manifest,omitempty"` // the inode; 0: the file system does not say
	Born     int64  `json:"born,omitempty"`     // as platform.FileID
}

// RefuseCopy refuses files that were copied while the queue was open, or after its process had
// died; and stores that are of another opening than the manifest.
func (d *Directory) RefuseCopy() error {
	what, err := d.copied()
	if err != nil || what == "" {
		return err
	}
	return fmt.Errorf("%w: %s: files of it may be of different moments (Checkpoint makes a good copy; AcceptCopy accepts this one)",
		base.ErrCopied, what)
}

// copied returns what shows that files were copied; "": nothing does.
func (d *Directory) copied() (what string, err error) {
	inodes := vfs.Root(d.FS) == vfs.Default
	if d.Open != nil && inodes {
		now, err := platform.IdentifyFile(d.FS.PathJoin(d.Path, Name))
		if err != nil {
			return "", err
		}
		if now.Differs(platform.FileID{Number: d.Open.Manifest, Born: d.Open.Born}) {
			return Name + " is not the file that was written", nil
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
		case d.Open != nil && r.Opening == d.Opening-1: // nothing was written in it since
			continue
		default:
			return fmt.Sprintf("%s was written in opening %d, and %s in opening %d", store, r.Opening, Name, d.Opening), nil
		}
		if d.Open == nil || !inodes {
			continue
		}
		if name, err := r.differs(dir); err != nil || name != "" {
			return fmt.Sprintf("%s in %s is not the file that was written", name, store), err
		}
	}
	return "", nil
}

// nextOpening returns the number of an opening that begins. If the last one has not reached every
// store, nobody could use the queue, and it goes on: so what a store says is at most one less than
// what the manifest says.
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

// Take begins to write a directory; copied: it may be a copy. boot is that of the machine, "" if it
// is not known; volatile is how what is acknowledged is about to be stored, nil if on the disk.
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

// Killed reports whether the application that opens the directory finds what its process before has
// left that died, or could not close it in order. REQUIRES: Take has been called.
func (d *Directory) Killed() bool { return d.killed && !d.Tool }

// Begin durably makes the directory one whose stores may be written: of the current format, or that
// of a node, a life of which begins.
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

// End notes that all stores are closed, if they are, so that files may be copied.
// REQUIRES: Begin has been called.
func (d *Directory) End() error {
	if d.Creating || d.Open == nil {
		return nil
	}
	if d.hold.checkAll() != nil {
		return nil // Close says it; the files stay those of a queue that was not closed
	}
	closed, err := d.IsClosed()
	if err != nil {
		return err
	}
	if !closed {
		if d.Node != "" || d.volatile == nil {
			return nil
		}
		d.Volatile = new(Volatile) // a store that has failed may lack what was acknowledged
		return d.Write()
	}
	if d.Opening > 0 && !d.hold.opened.Load() {
		d.Opening-- // a store that was missing, or another one, may be put back
	}
	if err := d.countStores(); err != nil {
		return err
	}
	d.Crashed = d.Crashed && (d.Tool || d.hold.recovered == nil || !d.hold.recovered())
	d.Open, d.Volatile = nil, nil
	return d.Write()
}

// Opened notes that all stores are open, and that calls may change them. Without it, End leaves the
// number of the opening before. A node may change its manifest meanwhile. recovered tells End
// whether all that was at work in a crash before has been taken back.
func (d *Directory) Opened(recovered func() bool) {
	d.hold.recovered = recovered
	d.hold.opened.Store(true)
}

// countStores makes all stores say that they are of this opening.
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
		if err := errors.Join(r.write(d.FS, dir, false, true), SyncDirectory(d.FS, dir)); err != nil {
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

// settle sets the place in a manifest that is about to be written to a file.
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
