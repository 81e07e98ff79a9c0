package codeq

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/inode"
	"codeq/internal/integrity"
)

// place is where the files of a queue lie: what the file system calls its directory
// and its manifest. A manifest has it from before the first store is written until all are
// closed and sealed. Files that are copied meanwhile, one after the other, are of different
// moments, and each of them may be whole; but they have other inodes then. A clone of the
// whole file system keeps them, and is of one moment, as what a power loss leaves.
//
// Device numbers are no part of it: many file systems have another one each time they are mounted.
type place struct {
	Directory uint64 `json:"directory,omitempty"` // 0: the file system does not say
	Manifest  uint64 `json:"manifest,omitempty"`
}

// placeNow is where the queue in a directory lies now.
func (d *directory) placeNow() (p place, err error) {
	info, err := d.fs.Stat(d.path)
	if err != nil {
		return p, err
	}
	p.Directory = inode.Number(info)
	if info, err = d.fs.Stat(d.fs.PathJoin(d.path, manifestName)); err != nil {
		return p, err
	}
	p.Manifest = inode.Number(info)
	return p, nil
}

// refuseCopy refuses files that were copied while the queue was open, or after its process had died.
func (d *directory) refuseCopy() error {
	if d.Open == nil {
		return nil
	}
	now, err := d.placeNow()
	if err != nil {
		return err
	}
	differ := func(a, b uint64) bool { return a != 0 && b != 0 && a != b }
	if differ(d.Open.Directory, now.Directory) || differ(d.Open.Manifest, now.Manifest) {
		return fmt.Errorf("%w: files of it may be of different moments (Checkpoint makes a good copy; AcceptCopy accepts this one)", ErrCopied)
	}
	return nil
}

// take begins to write a directory, which may be a copy if that is accepted.
func (d *directory) take(copied bool) error {
	if !copied {
		if err := d.refuseCopy(); err != nil {
			return err
		}
	}
	return d.begin()
}

// begin makes the directory one of the current format whose stores may be written, durably.
func (d *directory) begin() error {
	if d.Format == format && d.Open != nil {
		if now, err := d.placeNow(); err != nil || now == *d.Open {
			return err
		}
	}
	d.Format, d.Open = format, new(place)
	return d.write()
}

// end notes that all stores are closed, if they are, so that files may be copied.
// REQUIRES: begin has been called.
func (d *directory) end() error {
	if d.Creating || d.Open == nil {
		return nil
	}
	for _, dir := range d.stores() {
		if sealed, err := integrity.IsSealed(d.fs, dir); err != nil || !sealed {
			return err
		}
	}
	d.Open = nil
	return d.write()
}

// stores is the directories of all stores.
func (d *directory) stores() []string {
	var dirs []string
	for i := range d.Shards {
		dirs = append(dirs, shardDir(d.fs, d.path, i))
	}
	if d.Node != "" {
		dirs = append(dirs, d.fs.PathJoin(d.path, raftDir))
	}
	return dirs
}

// settle notes in the manifest where it is about to lie; f becomes its file.
func (d *directory) settle(f vfs.File) error {
	if d.Open == nil {
		return nil
	}
	info, err := d.fs.Stat(d.path)
	if err != nil {
		return err
	}
	file, err := f.Stat()
	if err != nil {
		return err
	}
	if p := (place{inode.Number(info), inode.Number(file)}); p != (place{}) {
		d.Open = &p
	}
	return nil
}
