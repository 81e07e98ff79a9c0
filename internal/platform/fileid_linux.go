package platform

import (
	"os"

	"golang.org/x/sys/unix"
)

// bornIsFixed: no call sets the time of birth of an inode, so that this time alone tells files
// apart: also on file systems that number inodes anew with each mount, or when they shrink.
const bornIsFixed = true

// IdentifyFile returns the ID of a file or a directory. It does not follow a link.
func IdentifyFile(path string) (FileID, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		info, err := os.Lstat(path) // an old kernel, or a sandbox, has no statx
		if err != nil {
			return FileID{}, err
		}
		return FileID{Number: InodeNumber(info)}, nil
	}
	id := FileID{Number: st.Ino}
	if st.Mask&unix.STATX_BTIME != 0 {
		id.Born = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return id, nil
}

// HasLastingDirectories reports whether inodes of directories below a path are the same for as long
// as the directories exist. Those of overlayfs change when they leave memory, unless all of its
// layers are on one file system.
func HasLastingDirectories(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type != unix.OVERLAYFS_SUPER_MAGIC
}
