package localsocket

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"codeq/internal/base"
)

// dirName is the directory of the socket, within that of the queue.
const dirName = "local"

const (
	socketName  = "socket"
	addressName = "address"
	tempName    = "address.tmp"
	shortPrefix = "codeq-" // of the name of a directory elsewhere

	maxPath = 103 // bytes of the path of a socket, on the system that allows least
)

// place is where a socket is.
type place struct {
	dir   string // within the queue's
	short string // the directory elsewhere; "": the socket is in dir
}

func placeIn(queue string) *place { return &place{dir: filepath.Join(queue, dirName)} }

func (p *place) address() string { return filepath.Join(p.dir, addressName) }

// socket is the path of the socket.
func (p *place) socket() string {
	if p.short != "" {
		return filepath.Join(p.short, socketName)
	}
	return filepath.Join(p.dir, socketName)
}

// listen makes the socket. REQUIRES: no other process serves the queue.
func (p *place) listen() (net.Listener, error) {
	if err := mkdir(p.dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if _, err := private(p.dir, ownUser); err != nil {
		return nil, err
	}
	if err := p.clear(); err != nil {
		return nil, err
	}
	if err := p.choose(); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", p.socket())
	if err != nil {
		return nil, fmt.Errorf("a socket in %s (its file system may have none): %w", filepath.Dir(p.socket()), err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // see remove
	if err := os.Chmod(p.socket(), 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// mkdir makes a directory that its owner may enter, with any umask.
func mkdir(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return os.Chmod(path, 0o700) //nolint:gosec // a directory
}

// choose finds a directory elsewhere if the path in the queue's is too long. The address is written
// first, so that the next process finds the directory if this one is killed.
func (p *place) choose() error {
	if len(p.socket()) <= maxPath {
		return nil
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	name := shortPrefix + hex.EncodeToString(random[:])
	for _, base := range shortBases() {
		p.short = filepath.Join(base, name)
		if !filepath.IsAbs(p.short) || len(p.socket()) > maxPath {
			continue
		}
		temp := filepath.Join(p.dir, tempName)
		if err := os.WriteFile(temp, []byte(p.socket()), 0o600); err != nil {
			return err
		}
		if err := os.Rename(temp, p.address()); err != nil {
			return err
		}
		if err := mkdir(p.short); err != nil {
			return err
		}
		_, err := private(p.short, ownUser)
		return err
	}
	p.short = ""
	return fmt.Errorf("the path of a socket has at most %d bytes: that of %s has more, as have those in %q", maxPath, p.socket(), shortBases())
}

// shortBases are the directories for a socket with a path that is too long in the queue's.
func shortBases() []string { return []string{os.TempDir(), os.Getenv("XDG_RUNTIME_DIR"), "/tmp"} }

// clear removes the socket of a process that was killed, wherever it is.
func (p *place) clear() error {
	old, err := p.read()
	if err != nil {
		return err
	}
	if err := old.removeShort(); err != nil {
		return err
	}
	for _, name := range []string{addressName, tempName} {
		if err := os.Remove(filepath.Join(p.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return removeSocket(p.socket())
}

// removeShort removes the socket that is in a directory elsewhere, if there is one.
func (p *place) removeShort() error {
	if p.short == "" || !strings.HasPrefix(filepath.Base(p.short), shortPrefix) {
		return nil
	}
	if _, err := private(p.short, ownUser); err != nil {
		return nil // it is not ours, or has gone
	}
	if err := removeSocket(p.socket()); err != nil {
		return err
	}
	return os.Remove(p.short)
}

// removeSocket removes a socket, and nothing else of that name.
func removeSocket(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != socketType:
		return fmt.Errorf("%s is no socket: %v", path, info.Mode())
	}
	return os.Remove(path)
}

// remove removes the place. REQUIRES: its listener is closed.
func (p *place) remove() error {
	err := p.clear()
	if err == nil {
		err = os.Remove(p.dir)
	}
	return err
}

// read returns where the address says that the socket is.
func (p *place) read() (*place, error) {
	b, err := os.ReadFile(p.address())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return p, nil
	case err != nil:
		return nil, err
	}
	path := string(b)
	if !filepath.IsAbs(path) || filepath.Base(path) != socketName {
		return nil, fmt.Errorf("%s holds no path of a socket: %.200q", p.address(), b)
	}
	return &place{dir: p.dir, short: filepath.Dir(path)}, nil
}

// find returns the path of a queue's socket, and the user that owns it. The error matches
// base.ErrNotServed if there is none.
func find(queue string) (path string, user int, err error) {
	p := placeIn(queue)
	user, err = private(p.dir, trustedUser)
	if err == nil {
		p, err = p.read()
	}
	if err == nil && p.short != "" {
		_, err = private(p.short, func(u int) bool { return u == user })
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: no process has it open and has called ServeLocal: start one, or use Open: %w", base.ErrNotServed, err)
	}
	if err != nil {
		return "", 0, err
	}
	return p.socket(), user, nil
}

// private makes sure that a path is a directory that only its owner may enter, and that the owner
// is good. The user is -1 if the system has none.
func private(path string, good func(user int) bool) (user int, err error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	user = ownerOf(info)
	switch {
	case !info.IsDir():
		return 0, fmt.Errorf("%w: %s is no directory: %v", fs.ErrPermission, path, info.Mode())
	case user < 0:
		return user, nil
	case !good(user):
		return 0, fmt.Errorf("%w: %s belongs to user %d", fs.ErrPermission, path, user)
	case info.Mode().Perm()&0o077 != 0:
		return 0, fmt.Errorf("%w: %s has mode %#o, allowed: 0700", fs.ErrPermission, path, info.Mode().Perm())
	}
	return user, nil
}

func ownUser(user int) bool { return user == os.Geteuid() }

// trustedUser reports whether a program may ask a process of a user: root asks any user's.
func trustedUser(user int) bool { return ownUser(user) || os.Geteuid() == 0 }
