// Package integrity finds damage in the files of a store that would otherwise be misread: Pebble
// takes a flipped bit in its newest log, or in its MANIFEST, for the end of that file, and loses
// the rest; one in the footer of a table may hide its keys, and is checked by package failstop.
//
// A store that is closed in order is sealed: a small file describes the others. Before the store is
// opened for writing the seal is checked and removed, so that a crash never leaves one. Without a
// seal, the MANIFEST itself is checked; see checkManifests.
package integrity

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/platform"
)

// SealName is the name of the seal in a store's directory:
//
//	CRC-32C of the rest, in hexadecimal
//	name size CRC-32C, a line for each file
//
// The CRC of a table covers only its end with the footer: Pebble has checksums for everything
// before.
const SealName = "SEAL"

// ErrDamaged is matched by every Error.
var ErrDamaged = errors.New("damaged")

// ErrLost is matched by the error of whatever finds that the directory of the store is not there
// any more: nothing that is done by its path concerns the store.
var ErrLost = errors.New("the directory of the store is not there any more")

// Error describes the damage of a file.
type Error struct {
	Dir, Name string
	What      string
}

func (e *Error) Error() string { return fmt.Sprintf("damaged: %s/%s %s", e.Dir, e.Name, e.What) }

// Is reports that every Error is an ErrDamaged.
func (e *Error) Is(target error) bool { return target == ErrDamaged }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// footerBytes is more than the length of the footer of a table.
const footerBytes = 128

// Seal durably seals a closed store.
func Seal(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	if err != nil {
		return err
	}
	slices.Sort(names)
	var text strings.Builder
	for _, name := range slices.DeleteFunc(names, func(name string) bool { return !ofStore(name) }) {
		f, err := describe(fs, dir, name)
		if err != nil {
			return err
		}
		fmt.Fprintln(&text, f)
	}
	return replace(fs, fs.PathJoin(dir, SealName), fmt.Appendf(nil, "%s\n%s", sum(text.String()), text.String()))
}

// IsSealed reports whether a store has a seal, without reading it.
func IsSealed(fs vfs.FS, dir string) (bool, error) {
	_, err := fs.Stat(fs.PathJoin(dir, SealName))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Check compares a store with its seal, without changes. If there is no seal, as after a crash, it
// calls checkManifests.
func Check(fs vfs.FS, dir string) (sealed bool, err error) {
	known, err := checkSeal(fs, dir)
	if err != nil {
		return false, err
	}
	if known == nil {
		return false, checkManifests(fs, dir)
	}
	names, err := fs.List(dir)
	if err != nil {
		return true, err
	}
	for _, name := range names { // Pebble ignores unknown tables
		if ofStore(name) && !IsTable(name) && !known[name] {
			return true, damaged(dir, name, "did not exist when it was closed")
		}
	}
	return true, nil
}

// Correct copies a sealed store, by hard links, into a directory that does not exist, and corrects
// one bit in each file that differs from the seal: the CRC tells which bit. ok is false, and
// nothing is copied, if all files match the seal, the seal itself is damaged, or more than one bit
// of a file is wrong. The copy matches the seal; the seal does not cover the blocks of tables.
func Correct(fs vfs.FS, dir, to string) (ok bool, err error) {
	sealed, err := readSeal(fs, dir)
	switch {
	case errors.Is(err, ErrDamaged) || err == nil && sealed == nil:
		return false, nil
	case err != nil:
		return false, err
	}
	corrected := make(map[string][]byte)
	for _, want := range sealed {
		have, err := describe(fs, dir, want.name)
		switch {
		case errors.Is(err, os.ErrNotExist):
			return false, nil
		case err != nil:
			return false, err
		case have == want:
			continue
		}
		if corrected[want.name], err = correct(fs, fs.PathJoin(dir, want.name), have, want); err != nil || corrected[want.name] == nil {
			return false, err
		}
	}
	if len(corrected) == 0 {
		return false, nil
	}
	if err := fs.MkdirAll(to, platform.DirMode); err != nil {
		return false, err
	}
	for _, f := range append(sealed, sealedFile{name: SealName}) {
		name := f.name
		if b, damaged := corrected[name]; damaged {
			err = platform.WriteFile(fs, fs.PathJoin(to, name), b)
		} else {
			err = fs.Link(fs.PathJoin(dir, name), fs.PathJoin(to, name))
		}
		if err != nil {
			return false, err
		}
	}
	return true, platform.SyncDirectory(fs, to)
}

// correct returns the content of a file with one bit corrected; nil if that is not enough.
func correct(fs vfs.FS, path string, have, want sealedFile) ([]byte, error) {
	if have.size != want.size {
		return nil, nil
	}
	b, err := platform.ReadFile(fs, path)
	if err != nil {
		return nil, err
	}
	covered := b[coveredFrom(want.name, want.size):]
	at, bit, ok := flipOf(have.crc^want.crc, len(covered))
	if !ok {
		return nil, nil
	}
	covered[at] ^= 1 << bit
	return b, nil
}

// coveredFrom returns the offset from which a seal's CRC covers a file.
func coveredFrom(name string, size int64) int64 {
	if IsTable(name) {
		return max(size-footerBytes, 0)
	}
	return 0
}

// Unseal checks a store, and durably removes its seal. REQUIRES: the directory exists.
func Unseal(fs vfs.FS, dir string) error {
	sealed, err := Check(fs, dir)
	if err != nil || !sealed {
		return err
	}
	return unseal(fs, fs.PathJoin(dir, SealName))
}

// fileSeal is the suffix of the seal of a single file: a line as in the seal of a store, after its
// checksum.
const fileSeal = ".seal"

// SealFile durably seals a closed file.
func SealFile(fs vfs.FS, path string) error {
	f, err := describe(fs, fs.PathDir(path), fs.PathBase(path))
	if err != nil {
		return err
	}
	line := f.String()
	return replace(fs, path+fileSeal, fmt.Appendf(nil, "%s\n%s\n", sum(line), line))
}

// RemoveFile durably removes a file and its seal, if they exist: the seal first, since one without
// its file is damage.
func RemoveFile(fs vfs.FS, path string) error {
	for _, name := range []string{path + fileSeal, path} {
		if err := fs.RemoveAll(name); err != nil {
			return err
		}
		if err := platform.SyncDirectory(fs, fs.PathDir(path)); err != nil {
			return err
		}
	}
	return nil
}

// CheckFile compares a file with its seal, if it has one, without changes.
func CheckFile(fs vfs.FS, path string) (sealed bool, err error) {
	dir, name := fs.PathDir(path), fs.PathBase(path)
	seal, err := platform.ReadFile(fs, path+fileSeal)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	head, line, _ := strings.Cut(strings.TrimSuffix(string(seal), "\n"), "\n")
	if head != sum(line) {
		return false, damaged(dir, name+fileSeal, "has a wrong checksum")
	}
	want, ok := parseSealedFile(line)
	if !ok || want.name != name {
		return false, damaged(dir, name+fileSeal, "says nothing of that file")
	}
	return true, want.check(fs, dir)
}

// UnsealFile checks a file, and durably removes its seal.
func UnsealFile(fs vfs.FS, path string) error {
	sealed, err := CheckFile(fs, path)
	if err != nil || !sealed {
		return err
	}
	return unseal(fs, path+fileSeal)
}

// TableSuffix is the suffix of the names of Pebble's tables.
const TableSuffix = ".sst"

const (
	logSuffix      = ".log"
	manifestPrefix = "MANIFEST-"
)

// ofStore reports whether a name is that of a file of Pebble.
func ofStore(name string) bool {
	return IsTable(name) || IsAppended(name) || strings.HasPrefix(name, "OPTIONS-") || strings.HasPrefix(name, "marker.")
}

// IsTable reports whether a file is a table of Pebble, by its name.
func IsTable(name string) bool { return strings.HasSuffix(name, TableSuffix) }

// IsAppended reports whether Pebble appends to a file of that name.
func IsAppended(name string) bool {
	return strings.HasSuffix(name, logSuffix) || strings.HasPrefix(name, manifestPrefix)
}

// sealedFile is the description of a file in a seal.
type sealedFile struct {
	name string
	size int64
	crc  uint32
}

func (f sealedFile) String() string { return fmt.Sprintf("%s %d %08x", f.name, f.size, f.crc) }

// check compares a file with its description.
func (f sealedFile) check(fs vfs.FS, dir string) error {
	have, err := describe(fs, dir, f.name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return damaged(dir, f.name, "is missing")
	case err != nil:
		return err
	case have != f:
		return damaged(dir, f.name, "is not as it was when it was closed")
	}
	return nil
}

// parseSealedFile is the inverse of String. It accepts no name outside the directory.
func parseSealedFile(line string) (f sealedFile, ok bool) {
	name, rest, _ := strings.Cut(line, " ")
	size, crc, _ := strings.Cut(rest, " ")
	bytes, sizeErr := strconv.ParseInt(size, 10, 64)
	sum, crcErr := strconv.ParseUint(crc, 16, 32)
	f = sealedFile{name, bytes, uint32(sum)}
	plain := name != "" && name != "." && name != ".." && !strings.ContainsAny(name, `/\`)
	return f, plain && bytes >= 0 && sizeErr == nil && crcErr == nil && f.String() == line
}

// parseSeal parses the text of a seal after its checksum. It requires names of store files in
// ascending order.
func parseSeal(text string) (files []sealedFile, ok bool) {
	for line := range strings.Lines(text) {
		f, ok := parseSealedFile(strings.TrimSuffix(line, "\n"))
		if !ok || !ofStore(f.name) || !strings.HasSuffix(line, "\n") || len(files) > 0 && files[len(files)-1].name >= f.name {
			return nil, false
		}
		files = append(files, f)
	}
	return files, true
}

// readSeal returns the content of the seal of a store; nil if there is none.
func readSeal(fs vfs.FS, dir string) (files []sealedFile, err error) {
	b, err := platform.ReadFile(fs, fs.PathJoin(dir, SealName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	head, text, _ := strings.Cut(string(b), "\n")
	if head != sum(text) {
		return nil, damaged(dir, SealName, "has a wrong checksum")
	}
	files, ok := parseSeal(text)
	if !ok || len(files) == 0 {
		return nil, damaged(dir, SealName, "is not one of a store")
	}
	return files, nil
}

// replace writes a file atomically and durably.
func replace(fs vfs.FS, path string, b []byte) error {
	if err := platform.WriteFile(fs, path+".tmp", b); err != nil {
		return err
	}
	if err := fs.Rename(path+".tmp", path); err != nil {
		return err
	}
	return platform.SyncDirectory(fs, fs.PathDir(path))
}

// checkSeal compares files with the seal, and returns their names; nil if there is no seal.
func checkSeal(fs vfs.FS, dir string) (known map[string]bool, err error) {
	files, err := readSeal(fs, dir)
	if files == nil || err != nil {
		return nil, err
	}
	known = make(map[string]bool)
	for _, want := range files {
		known[want.name] = true
		if err := want.check(fs, dir); err != nil {
			return known, err
		}
	}
	return known, nil
}

func unseal(fs vfs.FS, seal string) error {
	if err := fs.Remove(seal); err != nil {
		return err
	}
	return platform.SyncDirectory(fs, fs.PathDir(seal))
}

// describe returns the description of a file for a seal.
func describe(fs vfs.FS, dir, name string) (described sealedFile, err error) {
	f, err := fs.Open(fs.PathJoin(dir, name), vfs.SequentialReadsOption)
	if err != nil {
		return sealedFile{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return sealedFile{}, err
	}
	from := coveredFrom(name, info.Size())
	h := crc32.New(castagnoli)
	buf := make([]byte, min(info.Size()-from+1, 256<<10))
	if _, err := io.CopyBuffer(h, io.NewSectionReader(f, from, info.Size()-from), buf); err != nil {
		return sealedFile{}, err
	}
	return sealedFile{name, info.Size(), h.Sum32()}, nil
}

func damaged(dir, name, what string) error { return &Error{dir, name, what} }

func sum(text string) string { return fmt.Sprintf("%08x", crc32.Checksum([]byte(text), castagnoli)) }
