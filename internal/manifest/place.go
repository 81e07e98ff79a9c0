package manifest

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/inode"
	"codeq/internal/integrity"
)

// Place identifies the files of a queue: what the file system calls its directory and its manifest.
// A manifest has it from before the first store is written until all are closed and sealed. Files
// that are copied meanwhile, one after the other, are of different moments, although each of them
// may be whole; but they have other inodes. A clone of the whole file system keeps the inodes, and
// is of one moment, like the state after a power loss.
//
// Device numbers are not part of it: on many file systems they change with each mount.
type Place struct {
	Directory uint64 `json:"directory,omitempty"` // 0: the file system does not say
	Manifest  uint64 `json:"manifest,omitempty"`
}

// placeNow returns the current place of the queue in a directory.
func (d *Directory) placeNow() (p Place, err error) {
	info, err := d.FS.Stat(d.Path)
	if err != nil {
		return p, err
	}
	p.Directory = inode.Number(info)
	if info, err = d.FS.Stat(d.FS.PathJoin(d.Path, Name)); err != nil {
		return p, err
	}
	p.Manifest = inode.Number(info)
	return p, nil
}

// RefuseCopy refuses files that were copied while the queue was open, or after its process had
// died.
func (d *Directory) RefuseCopy() error {
	if d.Open == nil {
		return nil
	}
	now, err := d.placeNow()
	if err != nil {
		return err
	}
	differ := func(a, b uint64) bool { return a != 0 && b != 0 && a != b }
	if differ(d.Open.Directory, now.Directory) || differ(d.Open.Manifest, now.Manifest) {
		return fmt.Errorf("%w: files of it may be of different moments (Checkpoint makes a good copy; AcceptCopy accepts this one)", base.ErrCopied)
	}
	return nil
}

// Take begins to write a directory; copied: it may be a copy. boot is that of the machine, "" if it
// is not known; volatile is how a node is about to store what it acknowledges, nil if on the disk.
func (d *Directory) Take(copied bool, boot string, volatile *Volatile) error {
	if !copied {
		if err := d.RefuseCopy(); err != nil {
			return err
		}
	}
	if d.Node != "" {
		d.volatile = volatile
		d.renew(boot, volatile)
	}
	return d.Begin()
}

// Begin durably makes the directory one whose stores may be written: of the current format, or that
// of a node, a life of which begins.
func (d *Directory) Begin() error {
	if d.Node != "" {
		d.BeginLife()
	} else {
		if d.Format == Format && d.Open != nil {
			if now, err := d.placeNow(); err != nil || now == *d.Open {
				return err
			}
		}
		d.Format = Format
	}
	d.Open = new(Place)
	return d.Write()
}

// End notes that all stores are closed, if they are, so that files may be copied.
// REQUIRES: Begin has been called.
func (d *Directory) End() error {
	if d.Creating || d.Open == nil {
		return nil
	}
	if closed, err := d.IsClosed(); err != nil || !closed {
		return err
	}
	d.Open, d.Volatile = nil, nil
	return d.Write()
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

// settle sets the place in a manifest that will be written to f.
func (d *Directory) settle(f vfs.File) error {
	if d.Open == nil {
		return nil
	}
	info, err := d.FS.Stat(d.Path)
	if err != nil {
		return err
	}
	file, err := f.Stat()
	if err != nil {
		return err
	}
	if p := (Place{inode.Number(info), inode.Number(file)}); p != (Place{}) {
		d.Open = &p
	}
	return nil
}
