/** Keeps the end of a growing conversation in view, unless the reader has scrolled up. */

const NEAR_PX = 40;

export class Follower {
  #scroller;
  #button;
  #following = true;
  #top = 0;

  /** `button` leads back to the end. */
  constructor(scroller, button) {
    this.#scroller = scroller;
    this.#button = button;
    scroller.addEventListener("scroll", () => this.#scrolled());
    button.addEventListener("click", () => this.jump());
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  /** To be called after each change of the content. */
  follow() {
    if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#button.hidden = this.#following || this.#atEnd();
  }

  /** Goes to the end, and stays there. */
  jump() {
    this.#following = true;
    this.follow();
  }

  #scrolled() {
    const { scrollTop } = this.#scroller;
    // Only the reader scrolls up. A view that is no longer at the end because the content has grown stays tied to it.
    if (this.#atEnd()) this.#following = true;
    else if (scrollTop < this.#top) this.#following = false;
    this.#top = scrollTop;
    this.#button.hidden = this.#following;
  }

  #atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }
}
