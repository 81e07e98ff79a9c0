//go:build darwin || freebsd

package localsocket

import "golang.org/x/sys/unix"

// solLocal is the level of options of local sockets, SOL_LOCAL.
const solLocal = 0

// userOf returns the user of the process at the other end of a socket.
func userOf(fd uintptr) (user int, err error) {
	c, err := unix.GetsockoptXucred(int(fd), solLocal, unix.LOCAL_PEERCRED)
	if err != nil {
		return 0, err
	}
	return int(c.Uid), nil
}
