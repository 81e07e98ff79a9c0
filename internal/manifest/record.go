package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/integrity"
	"codeq/internal/platform"
)

// The record of a store, in a file PLACE beside Pebble's:
//
//	CRC-32C of the rest, in hexadecimal
//	JSON of the record
//
// It is written before anything in the store is changed in an opening, and again whenever a log or
// a MANIFEST is created. The first one is synced, the later ones are not: what a power loss leaves
// of PLACE is one of them, or nothing. A record that is missing, or not whole, says nothing.
const (
	placeName = "PLACE"
	placeTemp = "PLACE.tmp"
	// placeLink is a symbolic link to PLACE while the store is open. Programs that copy into files
	// that exist, as cp does, make a link anew.
	placeLink = "PLACE.link"
)

// record says in which opening a store was written, and which files it consists of.
type record struct {
	Queue   string `json:"queue"` // Manifest.ID: of another queue, the record says nothing
	Opening uint64 `json:"opening"`
	// Files are those that are written again and again, PLACE itself, its link, and as "." the
	// directory. Files of a store that was closed may be copied, and are not asked about.
	Files map[string]platform.FileID `json:"files,omitempty"`
}

// isStore reports whether the name of a directory is that of a store.
func isStore(name string) bool {
	number, ok := strings.CutPrefix(name, shardPrefix)
	_, err := strconv.Atoi(number)
	return ok && err == nil || name == RaftDir
}

// recordOf returns the record of a store of the queue; nil if there is none.
func (d *Directory) recordOf(dir string) (*record, error) {
	f, err := d.FS.Open(d.FS.PathJoin(dir, placeName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	sum, text, _ := strings.Cut(string(b), "\n")
	r := new(record)
	if sum != sumOfRecord(text) || json.Unmarshal([]byte(text), r) != nil || r.Queue != d.ID {
		return nil, nil
	}
	return r, nil
}

func sumOfRecord(text string) string {
	return fmt.Sprintf("%08x", crc32.Checksum([]byte(text), crc32.MakeTable(crc32.Castagnoli)))
}

// write replaces the record of a store in dir. inodes: the file system has such.
func (r *record) write(fsys vfs.FS, dir string, inodes, sync bool) error {
	temp := fsys.PathJoin(dir, placeTemp)
	f, err := fsys.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	if inodes {
		r.identify(dir, placeName, placeTemp)
	}
	b, err := json.Marshal(r)
	if err == nil {
		_, err = fmt.Fprintf(f, "%s\n%s", sumOfRecord(string(b)), b)
	}
	if err == nil && sync {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return fsys.Rename(temp, fsys.PathJoin(dir, placeName))
}

// identify notes which file has a name now, and will have another one. If that cannot be told,
// nothing is said of it.
func (r *record) identify(dir, name, now string) {
	id, err := platform.IdentifyFile(dir + string(os.PathSeparator) + now)
	if err != nil || id == (platform.FileID{}) {
		delete(r.Files, name)
		return
	}
	r.Files[name] = id
}

// differs returns the name of a file of the store that is not the one that was recorded; "": none
// is.
func (r *record) differs(dir string) (name string, err error) {
	for name, was := range r.Files {
		if name == "." && !platform.HasLastingDirectories(dir) {
			continue
		}
		now, err := platform.IdentifyFile(dir + string(os.PathSeparator) + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || now.Differs(was) {
			return name, err
		}
	}
	return "", nil
}

// begin writes the record of a store in a new opening, unless that was done.
func (h *hold) begin(d *heldDir, opening *record) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record != nil && d.record.Opening == opening.Opening {
		return nil
	}
	r := &record{Queue: opening.Queue, Opening: opening.Opening, Files: make(map[string]platform.FileID)}
	if h.inodes {
		names, err := h.FS.List(d.path)
		if err != nil {
			return err
		}
		for _, name := range names {
			if integrity.IsAppended(name) {
				r.identify(d.path, name, name)
			}
		}
		if platform.HasLastingDirectories(d.path) {
			r.identify(d.path, ".", ".")
		}
		// Some file systems have no links. One that exists is that of a killed process.
		if err := os.Symlink(placeName, h.PathJoin(d.path, placeLink)); err == nil || errors.Is(err, fs.ErrExist) {
			r.identify(d.path, placeLink, placeLink)
		}
	}
	if err := r.write(h.FS, d.path, h.inodes, true); err != nil {
		return err
	}
	d.record, d.written = r, time.Now()
	return nil
}

// note notes that a file of a store was created.
func (h *hold) note(d *heldDir, name string) {
	if d == nil || !h.inodes || !integrity.IsAppended(name) {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record != nil {
		d.record.identify(d.path, name, name)
		// Without it, the file is one of which nothing is known.
		_ = d.record.write(h.FS, d.path, h.inodes, false)
	}
}

// renewEvery is how old a record of a store becomes while the store is written.
const renewEvery = 10 * time.Second

// renew writes the record of a store anew if it is old: an older one that is written into its file
// names another file.
func (h *hold) renew(d *heldDir) {
	if d == nil || !h.inodes {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record != nil && time.Since(d.written) >= renewEvery {
		d.written = time.Now()
		_ = d.record.write(h.FS, d.path, h.inodes, false) // the older one stays
	}
}

// removed notes that a file of a store is about to be removed.
func (d *heldDir) removed(name string) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record != nil {
		delete(d.record.Files, name)
	}
}

// sealed is called before a store gets a file; with its seal it may be copied, and needs no link.
func (h *hold) sealed(d *heldDir, name string) {
	if d == nil || !h.inodes || name != integrity.SealName {
		return
	}
	d.removed(placeLink)
	_ = os.Remove(h.PathJoin(d.path, placeLink)) // otherwise it stays
}

// checkFiles makes sure that a store still has the files that were created in it.
func (d *heldDir) checkFiles() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record == nil {
		return nil
	}
	for name, was := range d.record.Files {
		if !integrity.IsAppended(name) {
			continue
		}
		path := d.path + string(os.PathSeparator) + name
		now, err := platform.IdentifyFile(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && now.Differs(was) {
			return lost(path)
		}
	}
	return nil
}
