package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
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
// It is written before the first change of the store in an opening, and again whenever a log or a
// MANIFEST is created. The first one is synced, the later ones are not: after a power loss, PLACE
// is one of them, or empty. A missing or incomplete record proves nothing.
const (
	placeName = "PLACE"
	placeTemp = "PLACE.tmp"
	// placeLink is a symbolic link to PLACE while the store is open. Programs that overwrite
	// existing files, such as cp, create a new link.
	placeLink = "PLACE.link"
)

// record has the opening of a store's last writes, and the identities of its files.
type record struct {
	Queue   string `json:"queue"` // Manifest.ID; the record of another queue proves nothing
	Opening uint64 `json:"opening"`
	// Files has the appended files, PLACE itself, its link, and as "." the directory. Files of a
	// closed store may be copied, and are not compared.
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
	b, err := platform.ReadFile(d.FS, d.FS.PathJoin(dir, placeName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
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

// write replaces the record of a store in dir. inodes: the file system has inodes.
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

// identify records under name the identity of the file now, before it is renamed. An unknown
// identity is left out.
func (r *record) identify(dir, name, now string) {
	id, err := platform.IdentifyFile(dir + string(os.PathSeparator) + now)
	if err != nil || id == (platform.FileID{}) {
		delete(r.Files, name)
		return
	}
	r.Files[name] = id
}

// differs returns the name of a file of the store that is not the recorded one; "": there is none.
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

// begin writes the record of a store in a new opening, once.
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
		// Some file systems have no links. An existing one was left by a killed process.
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

// note records a created file of a store.
func (h *hold) note(d *heldDir, name string) {
	if d == nil || !h.inodes || !integrity.IsAppended(name) {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record != nil {
		d.record.identify(d.path, name, name)
		// After an error, the file is unknown.
		_ = d.record.write(h.FS, d.path, h.inodes, false)
	}
}

// renewEvery is the interval between writes of a store's record while the store is written.
const renewEvery = 10 * time.Second

// renew rewrites the record of a store if it is old. So an older record that a copy writes into
// PLACE has another file's identity.
func (h *hold) renew(d *heldDir) {
	if d == nil || !h.inodes {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.record != nil && time.Since(d.written) >= renewEvery {
		d.written = time.Now()
		_ = d.record.write(h.FS, d.path, h.inodes, false) // after an error the older one stays
	}
}

// removed forgets a file of a store before it is removed.
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

// sealed is called before a file is created. It removes the link before the seal: a sealed store
// may be copied.
func (h *hold) sealed(d *heldDir, name string) {
	if d == nil || !h.inodes || name != integrity.SealName {
		return
	}
	d.removed(placeLink)
	_ = os.Remove(h.PathJoin(d.path, placeLink)) // after an error it stays
}

// checkFiles checks that a store still has its created files.
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
