package manifest

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/inode"
	"codeq/internal/integrity"
)

// Place is where the files of a queue lie: what the file system calls its directory and its
// manifest. A manifest has it from before the first store is written until all are closed and
// sealed. Files that are copied meanwhile, one after the other, are of different moments, and each
// of them may be whole; but they have other inodes then. A clone of the whole file system keeps
// them, and is of one moment, as what a power loss leaves.
//
// Device numbers are no part of it: many file systems have another one each time they are mounted.
type Place struct {
	Directory uint64 `json:"directory,omitempty"` // 0: the file system does not say
	Manifest  uint64 `json:"manifest,omitempty"`
}

// placeNow is where the queue in a directory lies now.
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

// Take begins to write a directory, which may be a copy if that is accepted.
func (d *Directory) Take(copied bool) error {
	if !copied {
		if err := d.RefuseCopy(); err != nil {
			return err
		}
	}
	return d.Begin()
}

// Begin makes the directory one of the current format whose stores may be written, durably.
func (d *Directory) Begin() error {
	if d.Format == Format && d.Open != nil {
		if now, err := d.placeNow(); err != nil || now == *d.Open {
			return err
		}
	}
	d.Format, d.Open = Format, new(Place)
	return d.Write()
}

// End notes that all stores are closed, if they are, so that files may be copied.
// REQUIRES: Begin has been called.
func (d *Directory) End() error {
	if d.Creating || d.Open == nil {
		return nil
	}
	for _, dir := range d.stores() {
		if sealed, err := integrity.IsSealed(d.FS, dir); err != nil || !sealed {
			return err
		}
	}
	d.Open = nil
	return d.Write()
}

// stores is the directories of all stores.
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

// settle notes in the manifest where it is about to lie; f becomes its file.
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
